#!/usr/bin/env bash
# Train on the hosts of a hostfile through ssh, without restarts:
#
#   launch/multi_node.sh [--hostfile FILE] [--master_addr ADDR] [--master_port PORT] TRAINING_ARGUMENTS
#
# It calls `deepspeed --hostfile`, which sends arguments, variables and folders to the shells of all hosts unquoted or in
# "...". This script quotes the arguments, and refuses everything else that a shell would expand. docs/multi_node.md
# describes the alternatives, such as `megaclip launch`, which needs no ssh and restarts a run.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

fail() {
  local message=$*
  echo "multi_node.sh: ${message//[[:cntrl:]]/?}" >&2
  exit 78 # as every refused setting: docs/operations.md
}

hostfile=$root/launch/hostfile master_addr='' master_port=29500
while [[ ${1-} =~ ^--(hostfile|master_addr|master_port)(=(.*))?$ ]]; do
  option=${BASH_REMATCH[1]}
  if [[ ${BASH_REMATCH[2]} ]]; then
    printf -v "$option" '%s' "${BASH_REMATCH[3]}" && shift
  else
    (($# > 1)) || fail "$1 requires a value"
    printf -v "$option" '%s' "$2" && shift 2
  fi
done
if (($# == 0)) || [[ $1 == --help ]]; then sed -n '2,8s/^# \{0,1\}//p' "$0" && exit $(($# == 0 ? 2 : 0)); fi

# Without a hostfile DeepSpeed warns and trains on this host alone.
[[ -f $hostfile ]] || fail "no hostfile $hostfile: copy launch/hostfile.example and list your hosts, or pass --hostfile"
is_utf8() { iconv -f UTF-8 -t UTF-8 "$1" >/dev/null 2>&1 || fail "$1: expected text in UTF-8, which DeepSpeed reads; convert it"; }
is_utf8 "$hostfile"
host_line='([A-Za-z0-9_][A-Za-z0-9_.@-]*@)?[A-Za-z0-9_][A-Za-z0-9_.-]*[[:space:]]+slots=[1-9][0-9]{0,3}'
if line=$(grep -anEv "^[[:space:]]*($host_line[[:space:]]*)?(#|\$)" "$hostfile" | tr '\0' '?'); then
  fail "$hostfile, line ${line%%$'\n'*}: expected HOST slots=RANKS, with HOST of letters, digits and . _ - @"
fi
first=$(awk '!/^[[:space:]]*(#|$)/ { print $1; exit }' "$hostfile")
[[ $first ]] || fail "$hostfile lists no host: add lines HOST slots=RANKS"
twice=$(awk '!/^[[:space:]]*(#|$)/ { sub(/.*@/, "", $1); if (seen[$1]++) { print $1; exit } }' "$hostfile")
[[ ! $twice ]] || fail "$hostfile lists $twice twice: write one line per host, with all its slots"
master_addr=${master_addr:-${first##*@}}
[[ $master_addr =~ ^[A-Za-z0-9_][A-Za-z0-9_.:-]*$ ]] ||
  fail "--master_addr '$master_addr': expected a host name or an address of letters, digits and . : _ -"
[[ $master_port =~ ^[1-9][0-9]{0,4}$ ]] && ((master_port < 65536)) ||
  fail "--master_port '$master_port': expected a number from 1 to 65535"

env_name=${DS_ENV_FILE:-.deepspeed_env}
if [[ $env_name == /* ]]; then env_files=("$env_name"); else env_files=("$HOME/$env_name" "./$env_name"); fi
for file in "${env_files[@]}"; do
  [[ -f $file ]] || continue
  is_utf8 "$file"
  if line=$(LC_ALL=C grep -anEv '^[A-Za-z_][A-Za-z0-9_]*=[^[:cntrl:]"$`\\]*$' "$file" | tr '\0' '?'); then
    fail "$file, line ${line%%:*}: expected NAME=VALUE without \" \$ \` \\ and control characters, on every line"
  fi
done
# DeepSpeed sends these variables, too.
while IFS= read -r -d '' variable; do
  [[ ! $variable =~ ^(MLFLOW|MV2|NCCL|PYTHON|UCX) ]] || [[ $variable != *[[:cntrl:]\"\$\`\\]* ]] ||
    fail "the environment variable ${variable%%=*}: expected no \" \$ \` \\ and control characters; unset or change it"
done < <(env -0)
command -v pdsh >/dev/null || fail "pdsh is not installed: apt-get install pdsh, or use megaclip launch"
for folder in "$root" "$PWD" "$(command -v deepspeed)"; do
  [[ $folder =~ ^[A-Za-z0-9_./@+,:=~-]*$ ]] || fail "pdsh cannot use the folder '$folder': rename it"
done

# A remote shell would expand globs and braces, so one pattern of shards would become a mixture of shards. DeepSpeed
# quotes only arguments with a space, with "...". pdsh replaces %n.
quoted=()
for argument in "$@"; do
  if [[ $argument == *' '* ]]; then argument=$(sed 's/[\\$`]/\\&/g' <<<"$argument"); else printf -v argument '%q' "$argument"; fi
  quoted+=("${argument//%/%%}")
done
export PDSH_RCMD_TYPE=ssh # never waits at a password prompt, and detects within 30 s that a host is unreachable
liveness='-o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=10 -o ServerAliveCountMax=3'
export PDSH_SSH_ARGS_APPEND="${PDSH_SSH_ARGS_APPEND:-} $liveness"
# DeepSpeed's own ssh check ignores PDSH_SSH_ARGS_APPEND; pdsh reports the same errors.
exec deepspeed --hostfile "$hostfile" --master_addr "$master_addr" --master_port "$master_port" --no_ssh_check \
  --force_multi "$root/launch/train.py" "${quoted[@]}"
