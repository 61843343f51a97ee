#!/bin/bash
# A real SLURM on this machine, for development and tests: one controller and several emulated nodes with fake GPUs.
#
#   slurm/dev_cluster.sh up      install Debian's packages if needed, start, wait until all nodes are idle; does nothing if it is running
#   slurm/dev_cluster.sh down    cancel all jobs, stop every process that `up` started, remove its entries from /etc/hosts
#   slurm/dev_cluster.sh status  exit code 0 if it is running
#
# Exit code 3: it cannot run on this machine (no root, no Debian, another cluster, no packages from apt). 1: it failed.
#
# Needs root on Debian or Ubuntu. The variables NODES, and CPUS, GPUS and MEMORY (MiB) of each node, set its size.
# It writes /etc/slurm, but refuses if another cluster's configuration is there.
set -euo pipefail

NODES=${NODES:-4} CPUS=${CPUS:-8} GPUS=${GPUS:-4} MEMORY=${MEMORY:-8000} PROCTRACK=${PROCTRACK:-linuxproc}
MARK="# written by rlx's slurm/dev_cluster.sh"
CONF=/etc/slurm RUN=/run/rlx-slurm SPOOL=/var/spool/rlx-slurm LOG=/var/log/rlx-slurm
ADDRESS=192.0.2.101 # from the range reserved for documentation, so nobody uses it

fail() { echo "dev_cluster: $*" >&2; exit 1; }
not_here() { echo "dev_cluster: $*" >&2; exit 3; }

ours() { [ -f $CONF/slurm.conf ] && head -1 $CONF/slurm.conf | grep -qF "$MARK"; }

runs() { # whether process $1 has the name $2
  [ "$(cat "/proc/$1/comm" 2>/dev/null)" = "$2" ]
}

alive() { # whether the process of pid file $1 is alive and has the name $2
  [ -s "$1" ] && runs "$(cat "$1")" "$2"
}

is_up() { ours && alive $RUN/slurmctld.pid slurmctld && [ "$(sinfo -h -o %D -t idle,mix,alloc,comp -p debug 2>/dev/null | awk "{n += \$1} END {print n + 0}")" = "$(grep -c . $RUN/nodes)" ]; }

install_packages() {
  command -v slurmctld >/dev/null && command -v slurmd >/dev/null && command -v squeue >/dev/null && command -v munged >/dev/null && return
  command -v apt-get >/dev/null || not_here "SLURM is not installed, and this is not Debian: install slurmctld, slurmd, slurm-client and munge yourself"
  local policy=/usr/sbin/policy-rc.d made=
  if [ ! -e $policy ]; then # keeps apt from starting services
    printf '#!/bin/sh\nexit 101\n' >$policy
    chmod +x $policy
    made=1
  fi
  export DEBIAN_FRONTEND=noninteractive
  local packages=(slurmctld slurmd slurm-client munge) log=$LOG/apt.log status=0
  # short timeouts: without a network apt would hang for minutes
  local apt=(apt-get -qq -o Acquire::http::Timeout=15 -o Acquire::https::Timeout=15 -o Acquire::Retries=1)
  local get=("${apt[@]}" install -y --no-install-recommends "${packages[@]}")
  "${get[@]}" >"$log" 2>&1 || { "${apt[@]}" update >>"$log" 2>&1 && "${get[@]}" >>"$log" 2>&1; } || status=1
  [ -z "$made" ] || rm -f $policy
  [ $status = 0 ] || not_here "apt-get could not install ${packages[*]}; the end of $log: $(tail -3 "$log")"
}

edit_hosts() { # replace our lines in /etc/hosts by those of standard input; in place, because containers mount the file
  local rest
  rest=$(grep -vF "$MARK" /etc/hosts || true)
  { echo "$rest"; cat; } >$RUN/hosts
  cat $RUN/hosts >/etc/hosts
}

write_config() {
  cat >$CONF/slurm.conf <<X
$MARK
ClusterName=rlxdev
SlurmctldHost=$(hostname)(127.0.0.1)
SlurmUser=root
SlurmdUser=root
# a requeued job starts again only after its old credential has expired; the default is two minutes
AuthInfo=cred_expire=5
StateSaveLocation=$SPOOL/ctld
SlurmdSpoolDir=$SPOOL/%n
SlurmctldPidFile=$RUN/slurmctld.pid
SlurmdPidFile=$RUN/slurmd-%n.pid
SlurmctldLogFile=$LOG/slurmctld.log
SlurmdLogFile=$LOG/slurmd-%n.log
ProctrackType=proctrack/$PROCTRACK
TaskPlugin=task/none
# nodes have the configured number of processors, whatever the machine has
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=1
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
# a job in partition \`high\` preempts one in \`debug\`, which gets its --signal and then has GraceTime to leave
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
ReturnToService=2
KillWait=5
# a busy machine may not answer, or not start a job's script, within the 10 s that are the default
MessageTimeout=100
BatchStartTimeout=100
MinJobAge=3600
GresTypes=gpu
NodeName=node[1-$NODES] NodeHostname=$(hostname) NodeAddr=127.0.0.1 Port=[17001-$((17000 + NODES))] CPUs=$CPUS RealMemory=$MEMORY Gres=gpu:$GPUS
PartitionName=debug Nodes=ALL Default=YES PriorityTier=1 GraceTime=30 DefMemPerCPU=$((MEMORY / CPUS))
PartitionName=high Nodes=ALL PriorityTier=10 PreemptMode=off DefMemPerCPU=$((MEMORY / CPUS))
X
  # slurmd needs a cgroup plugin even if no other plugin uses cgroups; version 1 needs no system service
  printf '%s\nCgroupPlugin=cgroup/v1\n' "$MARK" >$CONF/cgroup.conf
  printf '%s\nNodeName=node[1-%s] Name=gpu File=/dev/fakegpu[0-%s]\n' "$MARK" "$NODES" $((GPUS - 1)) >$CONF/gres.conf
}

up() {
  [ "$(id -u)" = 0 ] || not_here "needs root: it installs packages and writes $CONF"
  [ ! -e $CONF/slurm.conf ] || ours || not_here "$CONF/slurm.conf is another cluster's; nothing was changed"
  if is_up; then
    echo "SLURM is already up: $(wc -l <$RUN/nodes) nodes"
    return
  fi
  down >/dev/null
  install -d $CONF $RUN $LOG $SPOOL/ctld
  install_packages
  for i in $(seq "$NODES"); do
    install -d "$SPOOL/node$i"
    echo "127.0.1.$i node$i $MARK"
  done | edit_hosts
  seq "$NODES" >$RUN/nodes
  for i in $(seq 0 $((GPUS - 1))); do # each gres file must be its own device; these act like /dev/null
    [ -e "/dev/fakegpu$i" ] || mknod "/dev/fakegpu$i" c 1 3
  done
  if [ -z "$(hostname -I | tr -d ' ')" ] && command -v ip >/dev/null; then
    ip address add $ADDRESS/32 dev lo # srun fails on a host whose only address is 127.0.0.1
    touch $RUN/address
  fi
  write_config

  install -d -m 755 -o munge -g munge /run/munge
  [ -s /etc/munge/munge.key ] || install -m 400 -o munge -g munge <(head -c 1024 /dev/urandom) /etc/munge/munge.key
  if ! munge -n >/dev/null 2>&1; then
    runuser -u munge -- munged --pid-file=/run/munge/rlx-munged.pid
  fi
  slurmctld -c # -c: forget the jobs of an earlier cluster
  for i in $(seq "$NODES"); do slurmd -N "node$i"; done
  for _ in $(seq 600); do
    if [ "$(sinfo -h -o %D -t idle -p debug 2>/dev/null)" = "$NODES" ]; then
      echo "SLURM is up: $NODES nodes of $CPUS CPUs, $GPUS fake GPUs and $MEMORY MiB"
      return
    fi
    sleep 0.2
  done
  tail -5 $LOG/slurmctld.log >&2
  fail "the nodes are not idle after 120 s; see $LOG"
}

stop() { # $1 pid file, $2 name: SIGTERM, then SIGKILL after thirty seconds; waits for the process, which removes its pid file before it exits
  if alive "$1" "$2"; then
    local pid tenth
    pid=$(cat "$1")
    kill "$pid" 2>/dev/null || true
    for tenth in $(seq 350); do
      runs "$pid" "$2" || break
      [ "$tenth" != 300 ] || kill -9 "$pid" 2>/dev/null || true
      sleep 0.1
    done
  fi
  rm -f "$1"
}

down() {
  [ "$(id -u)" = 0 ] || fail "needs root"
  ours || { echo "SLURM is down: it was not started by this script"; return; }
  if alive $RUN/slurmctld.pid slurmctld; then
    scancel --user=root 2>/dev/null || true # all jobs on this cluster belong to root
    for _ in $(seq 300); do
      [ -n "$(squeue -h 2>/dev/null)" ] || break
      sleep 0.2
    done
  fi
  for _ in $(seq 300); do # a job's slurmstepd exits a moment after the job's processes
    grep -qx slurmstepd /proc/[0-9]*/comm 2>/dev/null || break
    sleep 0.1
  done
  for file in $RUN/slurmd-*.pid; do stop "$file" slurmd & done
  wait
  stop $RUN/slurmctld.pid slurmctld
  stop /run/munge/rlx-munged.pid munged
  [ ! -e $RUN/address ] || ip address del $ADDRESS/32 dev lo 2>/dev/null || true
  [ ! -d $RUN ] || edit_hosts </dev/null
  rm -rf $RUN $SPOOL $CONF/slurm.conf $CONF/cgroup.conf $CONF/gres.conf
  echo "SLURM is down"
}

case ${1:-} in
  up) up ;;
  down) down ;;
  status) is_up ;;
  *) sed -n '2,9s/^# \{0,1\}//p' "$0"; exit 2 ;;
esac
