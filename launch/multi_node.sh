#!/usr/bin/env bash
# Train on several hosts: `launch/multi_node.sh --help`, explained in docs/multi_node.md.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

usage() {
  cat <<EOF
Train on several hosts; everything after the options goes to launch/train.py.

  launch/multi_node.sh [OPTIONS] --deepspeed_config FILE --model NAME --train-data ...
      once, on any host that reaches all of them by ssh without a password: starts the ranks through pdsh
  launch/multi_node.sh --no_ssh --node_rank N [OPTIONS] --deepspeed_config FILE ...
      once on every host, N = 0, 1, ... in the order of the hostfile: needs no ssh

Options, before the training arguments:
  --hostfile FILE     lines "HOST slots=RANKS", one per host (default launch/hostfile; see launch/hostfile.example)
  --master_addr ADDR  address of the first host that all hosts reach (default: its name in the hostfile)
  --master_port PORT  free port on the first host (default 29500); runs that share a first host need different ones
  --no_ssh            start the ranks of this host only
  --node_rank N       with --no_ssh: this host's place in the hostfile, from 0
  --help

Variables for the ranks go into .deepspeed_env, in the home folder or here: lines NAME=VALUE, none blank.
EOF
}

fail() {
  echo "multi_node.sh: $1" >&2
  exit 2
}

hostfile=$root/launch/hostfile master_addr='' master_port=29500 no_ssh=false node_rank=''
while (($#)); do
  case $1 in
    --help | -h) usage && exit ;;
    --no_ssh) no_ssh=true && shift && continue ;;
    --hostfile | --master_addr | --master_port | --node_rank)
      (($# > 1)) || fail "$1 needs a value (see --help)"
      printf -v "${1#--}" '%s' "$2" && shift 2 ;;
    --hostfile=* | --master_addr=* | --master_port=* | --node_rank=*)
      option=${1%%=*} && printf -v "${option#--}" '%s' "${1#*=}" && shift ;;
    *) break ;;
  esac
done
(($#)) || { usage >&2; exit 2; }

# DeepSpeed trains on this host alone when the hostfile is missing, and says so only in a warning: check it here.
[[ -f $hostfile ]] || fail "no hostfile $hostfile: copy launch/hostfile.example and name your hosts, or give --hostfile"
if line=$(grep -nEv '^[[:space:]]*(#|$)|^[[:space:]]*[^[:space:]]+[[:space:]]+slots=[0-9]+' "$hostfile"); then
  fail "$hostfile, line ${line%%$'\n'*}: expected HOST slots=RANKS"
fi
mapfile -t hosts < <(awk '!/^[[:space:]]*(#|$)/ { print $1 }' "$hostfile")
((${#hosts[@]})) || fail "$hostfile names no host"
master_addr=${master_addr:-${hosts[0]#*@}}
if ((${#hosts[@]} > 1)) && [[ $master_addr == localhost || $master_addr == 127.* ]]; then
  fail "the other hosts cannot reach $master_addr: give --master_addr an address of the first host that they reach"
fi
command -v deepspeed >/dev/null || fail "deepspeed is not on PATH: activate the environment that MegaCLIP is installed in"

# The files that DeepSpeed reads, under the name that DeepSpeed reads.
env_name=${DS_ENV_FILE:-.deepspeed_env}
if [[ $env_name == /* ]]; then env_files=("$env_name"); else env_files=("$HOME/$env_name" "./$env_name"); fi
for file in "${env_files[@]}"; do
  [[ -f $file ]] || continue
  if line=$(grep -nEv '^[A-Za-z_][A-Za-z0-9_]*=' "$file"); then
    fail "$file, line ${line%%$'\n'*}: expected NAME=VALUE, without blank lines, spaces before the = or comments"
  fi
done

# setsid: away from the terminal, so that Ctrl-C reaches `stop` alone.
launch=(setsid deepspeed --hostfile "$hostfile" --master_addr "$master_addr" --master_port "$master_port")

if $no_ssh; then
  [[ $node_rank =~ ^[0-9]+$ ]] && ((node_rank < ${#hosts[@]})) ||
    fail "--no_ssh needs --node_rank 0 to $((${#hosts[@]} - 1)), this host's place in $hostfile; got '$node_rank'"
  # DeepSpeed reads these files on the way to pdsh only.
  for file in "${env_files[@]}"; do
    [[ -f $file ]] || continue
    while IFS= read -r line || [[ $line ]]; do export "${line?}"; done <"$file"
  done
  launch+=(--no_ssh --node_rank "$node_rank" "$root/launch/train.py" "$@")
else
  [[ -z $node_rank ]] || fail "--node_rank goes with --no_ssh"
  command -v pdsh >/dev/null || fail "pdsh is not installed: install it on this host, or use --no_ssh on every host"
  [[ $root$PWD != *[[:space:]]* ]] || fail "pdsh cannot pass on folders with spaces: $root, $PWD"
  export PDSH_RCMD_TYPE=ssh
  # Never wait at a password prompt, and notice within 30 s that a host is gone.
  liveness='-o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=10 -o ServerAliveCountMax=3'
  export PDSH_SSH_ARGS_APPEND="${PDSH_SSH_ARGS_APPEND:-} $liveness"
  # DeepSpeed hands the arguments to a remote shell, which would expand globs and braces (a pattern of shards would turn
  # into a mixture of shards). It puts "..." around those with a space and quotes nothing else; pdsh replaces %n.
  quoted=()
  for argument in "$@"; do
    if [[ $argument == *' '* ]]; then
      argument=$(sed 's/[\\$`]/\\&/g' <<<"$argument")
    else
      printf -v argument '%q' "$argument"
    fi
    quoted+=("${argument//%/%%}")
  done
  # DeepSpeed's own ssh check ignores PDSH_SSH_ARGS_APPEND; pdsh reports the same errors.
  launch+=(--no_ssh_check --force_multi "$root/launch/train.py" "${quoted[@]}")
fi

# To the ranks of this job and host, or hosts: not to DeepSpeed's handlers, of which one would end every DeepSpeed job of
# this user and the other gives a rank 30 s. Ranks outlive the ssh connection that started them: one that waits in a
# collective for a dead rank would hold its GPU until the backend's timeout. The ^ keeps the pattern from matching pdsh
# and the shells that run it.
signal_ranks() {
  local launcher_of_ranks="^[^ ]+ -u -m deepspeed.launcher.launch .*--master_addr=$master_addr --master_port=$master_port "
  local command="pgrep -f '$launcher_of_ranks' | xargs -r -n 1 pkill -$1 -P"
  if $no_ssh; then bash -c "$command"; else pdsh -w "$(IFS=, && echo "${hosts[*]}")" "$command"; fi || true
}

end_at_once() {
  trap '' INT TERM USR1 USR2
  signal_ranks KILL
  pkill -TERM -P "$launcher" || kill -TERM "$launcher" 2>/dev/null || true
  wait "$launcher" || true
  exit 1
}

told='' # "yes" once the ranks have been told to save and end; only they know whether they do
stop() {
  [[ -z $told || $1 == USR1 ]] || end_at_once
  told=yes
  echo "multi_node.sh: ranks that train save after this step and end; Ctrl-C or SIGTERM ends them at once" >&2
  signal_ranks "$1"
}

failed() {
  trap '' USR2
  local or_what=${told:+, or was told to end before it trained}
  echo "multi_node.sh: a rank failed$or_what: see the first error above, and docs/multi_node.md" >&2
  for _ in {1..5}; do # the other hosts may be about to say why
    kill -0 "$launcher" 2>/dev/null || break
    sleep 1
  done
  end_at_once
}

# What ranks leave with that have saved because of a signal: 128 + SIGINT, SIGUSR1 or SIGTERM.
stop_codes='130|138|143'

# pdsh says at once that a host failed and goes on to wait for the others (its option -k is not in every pdsh 2.34).
watch_for_failure() {
  trap '' INT TERM USR1 # it ends when all has been said
  local line
  while IFS= read -r line; do
    printf '%s\n' "$line" >&2
    [[ ! $line =~ exit\ code\ ($stop_codes)$ ]] || continue
    if [[ $line =~ ^pdsh@.*:\ ssh\ (exited|killed) ]]; then kill -USR2 $$; fi
  done
}

wait_for_launcher() {
  local code=0
  # A trapped signal ends `wait` before its time, with the signal's code.
  while kill -0 "$launcher" 2>/dev/null; do wait "$launcher" || true; done
  wait "$launcher" || code=$? # bash has kept it
  [[ $code =~ ^(0|$stop_codes)$ ]] || failed
  exit "$code"
}

# What was said last may still be on its way when the launcher has ended. Not for ever: what it left behind may hold the
# pipe.
let_it_speak() {
  for _ in {1..100}; do
    kill -0 "$watcher" 2>/dev/null || break
    sleep 0.1
  done
}

trap 'stop TERM' INT TERM
trap 'stop USR1' USR1
trap failed USR2
trap let_it_speak EXIT
exec {errors}> >(watch_for_failure)
watcher=$!
# Some of Slurm's ways to signal a job reach every process: the launcher must not die of what the ranks wait for.
(trap '' USR1 && exec "${launch[@]}" 2>&"$errors" {errors}>&-) &
launcher=$!
exec {errors}>&-
wait_for_launcher # does not return: bash would go on reading a file that may have changed since
