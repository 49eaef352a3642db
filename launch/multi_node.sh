#!/usr/bin/env bash
# Train on several hosts. See `launch/multi_node.sh --help` and docs/multi_node.md.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

usage() {
  cat <<EOF
Train on several hosts. All arguments after the options are passed to launch/train.py.

  launch/multi_node.sh [OPTIONS] --deepspeed_config FILE --model NAME --train-data ...
      run it once, on a host that reaches all hosts by ssh without a password; it starts the ranks through pdsh
  launch/multi_node.sh --no_ssh --node_rank N [OPTIONS] --deepspeed_config FILE ...
      run it once on every host, N = 0, 1, ... in the order of the hostfile; it does not use ssh

Options, before the training arguments:
  --hostfile FILE     lines "HOST slots=RANKS", one per host (default launch/hostfile; see launch/hostfile.example)
  --master_addr ADDR  address of the first host, reachable from all hosts (default: its name in the hostfile)
  --master_port PORT  free port on the first host (default 29500); runs with the same first host require different ports
  --no_ssh            start the ranks of this host only
  --node_rank N       with --no_ssh: index of this host in the hostfile, from 0
  --restarts N        after a failure, start again from the newest checkpoint on the hosts that answer, at most N times;
                      requires --resume auto and --name (docs/multi_node.md)
  --check_hosts       first compare and measure all hosts; start nothing if there is a problem
  --help

Environment variables for the ranks are read from .deepspeed_env in the home folder and in the current folder: lines
NAME=VALUE, no blank lines.
EOF
}

fail() {
  echo "multi_node.sh: $*" >&2
  exit 2
}

hostfile=$root/launch/hostfile master_addr='' master_port=29500 no_ssh=false node_rank='' restarts='' check_hosts=false
while (($#)); do
  case $1 in
    --help | -h) usage && exit ;;
    --no_ssh) no_ssh=true && shift && continue ;;
    --check_hosts) check_hosts=true && shift && continue ;;
    --hostfile | --master_addr | --master_port | --node_rank | --restarts)
      (($# > 1)) || fail "$1 requires a value (see --help)"
      printf -v "${1#--}" '%s' "$2" && shift 2 ;;
    --hostfile=* | --master_addr=* | --master_port=* | --node_rank=* | --restarts=*)
      option=${1%%=*} && printf -v "${option#--}" '%s' "${1#*=}" && shift ;;
    *) break ;;
  esac
done
(($#)) || { usage >&2; exit 2; }

# Without a hostfile DeepSpeed only warns and trains on this host alone, so check it here.
[[ -f $hostfile ]] || fail "no hostfile $hostfile: copy launch/hostfile.example and list your hosts, or pass --hostfile"
# Host names, the address, the port and the values of variables are passed to the shells of all hosts without quotes, or
# only in "...". So everything that a shell could expand is refused before anything is started.
host_line='([A-Za-z0-9_][A-Za-z0-9_.@-]*@)?[A-Za-z0-9_][A-Za-z0-9_.-]*[[:space:]]+slots=[1-9][0-9]{0,3}'
if line=$(grep -anEv "^[[:space:]]*($host_line[[:space:]]*)?(#|\$)" "$hostfile" | tr '\0' '?'); then
  fail "$hostfile, line ${line%%$'\n'*}: expected HOST slots=RANKS, with HOST of letters, digits and . _ - @"
fi
mapfile -t hosts < <(awk '!/^[[:space:]]*(#|$)/ { print $1 }' "$hostfile")
((${#hosts[@]})) || fail "$hostfile lists no host: add lines HOST slots=RANKS"
twice=$(printf '%s\n' "${hosts[@]}" | sort | uniq -d | head -n 1)
[[ -z $twice ]] || fail "$hostfile: $twice is listed twice; remove one of the lines"
master_addr=${master_addr:-${hosts[0]##*@}}
[[ $master_addr =~ ^[A-Za-z0-9_][A-Za-z0-9_.:-]*$ ]] ||
  fail "--master_addr '$master_addr': expected a host name or an address of letters, digits and . : _ -"
[[ $master_port =~ ^[1-9][0-9]{0,4}$ ]] && ((master_port < 65536)) ||
  fail "--master_port '$master_port': expected a number from 1 to 65535"
if ((${#hosts[@]} > 1)) && [[ $master_addr == localhost || $master_addr == 127.* ]]; then
  fail "--master_addr $master_addr: the other hosts cannot reach it; pass another address of the first host"
fi
[[ -z $restarts || $restarts =~ ^[1-9][0-9]{0,3}$ ]] || fail "--restarts '$restarts': expected a number from 1 to 9999"
command -v deepspeed >/dev/null || fail "deepspeed is not on PATH: activate the environment that contains MegaCLIP"

# The environment files that DeepSpeed reads.
env_name=${DS_ENV_FILE:-.deepspeed_env}
if [[ $env_name == /* ]]; then env_files=("$env_name"); else env_files=("$HOME/$env_name" "./$env_name"); fi
for file in "${env_files[@]}"; do
  [[ -f $file ]] || continue
  if line=$(grep -anEv '^[A-Za-z_][A-Za-z0-9_]*=' "$file" | tr '\0' '?'); then
    fail "$file, line ${line%%:*}: expected NAME=VALUE; remove blank lines, comments and spaces before the ="
  fi
  if line=$(grep -anE '[[:cntrl:]]' "$file" | tr '\0' '?'); then
    fail "$file, line ${line%%:*}: expected text without control characters; convert Windows line ends with dos2unix"
  fi
  $no_ssh && continue
  # DeepSpeed sends them to the remote shells in "...".
  if line=$(grep -anE '["$`\\]' "$file"); then
    fail "$file, line ${line%%$'\n'*}: expected a value without \" \$ \` \\, which the remote shells would expand;" \
      "change it, or use --no_ssh on every host"
  fi
done

options=(--hostfile "$hostfile" --master_addr "$master_addr" --master_port "$master_port")

# Let another process start this script once per attempt. The arguments are those of the training.
supervise() {
  exec python -m megaclip supervise --restarts "$restarts" --script "$root/launch/multi_node.sh" "${options[@]}" \
    ${node_rank:+--node_rank "$node_rank"} -- "$@"
}

# setsid detaches the launcher from the terminal, so that Ctrl-C reaches only `stop`.
launch=(setsid deepspeed "${options[@]}")
completed='' # temporary file, with --no_ssh

if $no_ssh; then
  ! $check_hosts || fail "--check_hosts asks the hosts through ssh; it does not work with --no_ssh"
  [[ $node_rank =~ ^[0-9]+$ ]] && ((10#$node_rank < ${#hosts[@]})) ||
    fail "--node_rank '$node_rank': --no_ssh requires --node_rank 0 to $((${#hosts[@]} - 1)), the index in $hostfile"
  [[ -z $restarts ]] || supervise "$@"
  # DeepSpeed reads these files only when it uses pdsh.
  for file in "${env_files[@]}"; do
    [[ -f $file ]] || continue
    while IFS= read -r line || [[ $line ]]; do export "${line?}"; done <"$file"
  done
  launch+=(--no_ssh --node_rank "$node_rank" "$root/launch/train.py" "$@")
  # `deepspeed` exits with 0 when the launcher of the ranks was killed. The ranks report a complete run themselves.
  completed=$(mktemp)
  export MEGACLIP_COMPLETED_FILE=$completed
else
  [[ -z $node_rank ]] || fail "--node_rank $node_rank requires --no_ssh"
  command -v pdsh >/dev/null || fail "pdsh is not installed: install it on this host, or use --no_ssh on every host"
  for folder in "$root" "$PWD" "$(command -v deepspeed)"; do
    [[ $folder != *[[:space:][:cntrl:]\"\'\`\$\&\|\;\<\>\(\)\{\}\[\]\*\?\!\\%]* ]] ||
      fail "pdsh does not support folders with spaces or characters of the shell: $folder; rename it, or use --no_ssh" \
        "on every host"
  done
  # DeepSpeed sends these variables to the remote shells, too.
  while IFS= read -r -d '' variable; do
    name=${variable%%=*}
    [[ $name =~ ^(MLFLOW|MV2|NCCL|PYTHON|UCX) ]] || continue
    [[ $name =~ ^[A-Za-z0-9_]+$ && ${variable#*=} != *[[:cntrl:]\"\$\`\\]* ]] ||
      fail "the environment variable $name: expected a value without \" \$ \` \\ and control characters, which the" \
        "remote shells would expand; change or unset it"
  done < <(env -0)
  export PDSH_RCMD_TYPE=ssh
  # Never wait at a password prompt. Detect within 30 s that a host is unreachable.
  liveness='-o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=10 -o ServerAliveCountMax=3'
  export PDSH_SSH_ARGS_APPEND="${PDSH_SSH_ARGS_APPEND:-} $liveness"
  if $check_hosts && ! python -m megaclip check-hosts "${options[@]}" -- "$@"; then
    fail "the hosts have the problems above; remove them, or leave out --check_hosts"
  fi
  [[ -z $restarts ]] || supervise "$@"
  # DeepSpeed passes the arguments to a remote shell, which would expand globs and braces: one pattern of shards would
  # become a mixture of shards. DeepSpeed quotes only arguments with a space, with "...". pdsh replaces %n.
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

# Lines "HOST EXIT_CODE", for `megaclip supervise`. The disk may be full, or a system that deletes old temporary files may
# have deleted it: ranks are ended without it, too.
host_codes=${MEGACLIP_HOST_CODES:-$(mktemp)}
note() { { echo "$1" >>"$host_codes"; } 2>/dev/null || true; }

# Run a shell command for each of DeepSpeed's launchers of this job, whose process id is $0, on this host or on all
# hosts. The ^ keeps the pattern from matching pdsh and the shells that run it.
for_launchers() {
  local launcher_of_ranks="^[^ ]+ -u -m deepspeed.launcher.launch .*--master_addr=$master_addr --master_port=$master_port "
  local command="pgrep -f '$launcher_of_ranks' | xargs -r -n 1 sh -c '$1'"
  if $no_ssh; then bash -c "$command"; else pdsh -w "$(IFS=, && echo "${hosts[*]}")" "$command"; fi || true
}

# Send a signal to the ranks of this job. The signal must not reach DeepSpeed's signal handlers: one of them ends every
# DeepSpeed job of this user, the other gives a rank only 30 s. Ranks continue when the ssh connection that started them
# ends. A rank that waits in a collective for a dead rank would keep its GPU until the backend's timeout. If a launcher
# has no ranks yet, because importing DeepSpeed takes seconds, the launcher itself is ended. A launcher whose ranks have
# just ended must not be ended, because their exit code would be lost. It ends after a moment.
moment_s=3
signal_ranks() {
  if [[ $1 == KILL ]]; then
    for_launchers 'pkill -KILL -P $0 || kill -KILL $0'
  else
    for_launchers "pkill -$1 -P \$0 || { sleep $moment_s; pkill -$1 -P \$0 || kill -TERM \$0; } 2>/dev/null"
  fi
}

# End launchers that had not started when a signal was sent to the ranks, before they start ranks.
end_late_launchers() {
  for _ in {1..30}; do
    sleep 2
    kill -0 "$launcher" 2>/dev/null || return 0
    for_launchers "pgrep -P \$0 || { sleep $moment_s; pgrep -P \$0 || kill -TERM \$0; }" >/dev/null 2>&1
  done
}

end_at_once() {
  trap '' INT TERM USR1 USR2
  : "${launcher:=$!}" # a signal can arrive between the start of the launcher and the assignment below
  note ended # the exit codes that follow are those of ranks that this script has ended
  signal_ranks KILL
  pkill -TERM -P "$launcher" || kill -TERM "$launcher" 2>/dev/null || true
  wait "$launcher" || true
  signal_ranks KILL # of a host whose launcher started meanwhile
  if [[ ${code-} == "$refused" ]] || sed '/^ended$/,$d' "$host_codes" 2>/dev/null | grep -q " $refused\$"; then
    exit "$refused"
  fi
  exit 1
}

starting_s=120 # until then a host may not have started its launcher
stop_requested='' # "yes" after a signal was sent to the ranks. Their exit codes report whether they saved.
stop() {
  [[ -z $stop_requested || $1 == USR1 ]] || end_at_once
  stop_requested=yes
  echo "multi_node.sh: training ranks save after this step and end; another Ctrl-C or SIGTERM ends them at once" >&2
  signal_ranks "$1"
  if ((SECONDS < starting_s)); then
    (trap '' INT TERM USR1 USR2 && end_late_launchers) </dev/null >/dev/null 2>&1 &
  fi
}

failed() {
  trap '' USR2
  : "${launcher:=$!}" # as above
  local or_stopped=${stop_requested:+, or received the signal before it trained}
  echo "multi_node.sh: a rank failed$or_stopped: see the first error above, and docs/multi_node.md" >&2
  for _ in {1..5}; do # the other hosts may still print the cause
    kill -0 "$launcher" 2>/dev/null || break
    sleep 1
  done
  end_at_once
}

# Exit codes of ranks that have saved because of a signal: 128 + SIGINT, SIGUSR1 or SIGTERM.
stop_codes='130|138|143'
refused=78 # exit code of ranks whose settings are refused, so that a restart would not help

# pdsh reports a failed host at once but keeps waiting for the others (not every pdsh 2.34 has the option -k).
watch_for_failure() {
  trap '' INT TERM USR1 # it ends at the end of the output
  local line
  while IFS= read -r line; do
    printf '%s\n' "$line" >&2
    [[ ! $line =~ exit\ code\ ($stop_codes)$ ]] || continue
    if [[ $line =~ ^pdsh@[^:]*:\ ([^ ]+):\ ssh\ exited\ with\ exit\ code\ ([0-9]+)$ ]]; then
      note "${BASH_REMATCH[1]} ${BASH_REMATCH[2]}"
    fi
    if [[ $line =~ ^pdsh@.*:\ ssh\ (exited|killed) ]]; then kill -USR2 $$; fi
  done
}

wait_for_launcher() {
  # A signal interrupts `wait`, which then returns the signal's code, and bash may lose that of a launcher which ends at
  # this moment. So wait only for a launcher that has ended. A signal is too late then.
  while kill -0 "$launcher" 2>/dev/null; do sleep 0.2 || true; done
  trap '' INT TERM USR1
  code=0
  wait "$launcher" || code=$? # bash keeps the exit code
  if [[ ! $code =~ ^(0|$stop_codes)$ ]]; then
    if $no_ssh; then note "${hosts[10#$node_rank]} $code"; fi
    failed
  fi
  if $no_ssh; then
    [[ $code != 0 || -s $completed ]] || code=1
    ((code != 1)) || echo "multi_node.sh: the launcher of the ranks was killed; they save and end" >&2
  fi
  exit "$code"
}

# The last output may still be in the pipe when the launcher has ended. The wait is limited, because a process that the
# launcher left behind may keep the pipe open.
wait_for_last_output() {
  for _ in {1..100}; do
    kill -0 "$watcher" 2>/dev/null || break
    sleep 0.1
  done
}

early='' # signal that has arrived before the launcher's process was noted: `stop` needs it, and changes $!
trap 'early=TERM' INT TERM
trap 'early=USR1' USR1
trap failed USR2
trap 'wait_for_last_output; rm -f ${completed:+"$completed"}; [[ ${MEGACLIP_HOST_CODES-} ]] || rm -f "$host_codes"' EXIT
exec {errors}> >(watch_for_failure)
watcher=$!
# Slurm can send SIGUSR1 to every process of a job. The launcher must ignore it and wait for the ranks.
(trap '' USR1 && exec "${launch[@]}" 2>&"$errors" {errors}>&-) &
launcher=$!
exec {errors}>&-
trap 'stop TERM' INT TERM
trap 'stop USR1' USR1
[[ -z $early ]] || stop "$early"
wait_for_launcher # does not return, so bash does not read more of this file, which may have changed
