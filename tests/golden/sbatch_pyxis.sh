#!/bin/bash

# Parameters
#SBATCH --account=team_rl
#SBATCH --exclusive
#SBATCH --gres=gpu:8
#SBATCH --job-name=mine
#SBATCH --mem=0
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --open-mode=append
#SBATCH --output=/shared/outputs/mine/.submitit/%j_0_log.out
#SBATCH --partition=batch
#SBATCH --requeue
#SBATCH --signal=B:USR2@120
#SBATCH --time=1440

# setup
trap '' USR2 # the notice would kill the job before Python handles it
set -e
cd /
export PYTHONPATH=/shared/outputs/mine/.submitit/code_1:/
export PYTHONSAFEPATH=1
export HF_HOME=/lustre/team_rl/hub
export HF_HUB_CACHE=/lustre/team_rl/hub/hub
export HF_DATASETS_CACHE=/lustre/team_rl/hub/datasets
export HF_HUB_OFFLINE=1
export PYTHONNOUSERSITE=1
export TRITON_CACHE_DIR=/home/me/.cache/triton
export NCCL_SOCKET_IFNAME=eth0 GLOO_SOCKET_IFNAME=eth0
case "${PYTHONPATH-}" in /shared/outputs/mine/.submitit/code_1*) ;; *) export PYTHONPATH=/shared/outputs/mine/.submitit/code_1"${PYTHONPATH:+:$PYTHONPATH}":/ ;; esac
export PYTHONSAFEPATH=1
env -u SLURM_NTASKS -u SLURM_NPROCS -u SLURM_NTASKS_PER_NODE -u SLURM_TASKS_PER_NODE -u SLURM_NNODES -u SLURM_DISTRIBUTION -u SLURM_GPUS -u SLURM_GPUS_PER_NODE -u SLURM_GPUS_PER_TASK -u SLURM_GPUS_PER_SOCKET -u RANK -u LOCAL_RANK -u WORLD_SIZE -u LOCAL_WORLD_SIZE -u GROUP_RANK -u GROUP_WORLD_SIZE -u ROLE_RANK -u ROLE_WORLD_SIZE -u MASTER_ADDR -u MASTER_PORT srun --overlap --nodes=2 --ntasks=2 --ntasks-per-node=1 --job-name=caches --cpu-bind=none --mem=0 --input=none mkdir -p /home/me/.cache /home/me/.cache/rlx /lustre/team_rl/hub
export RLX_MOUNTS=/home/me/.cache:/home/me/.cache,/lustre/team_rl/hub:/lustre/team_rl/hub,/shared/outputs/mine:/shared/outputs/mine,/lustre/team_rl/data:/lustre/team_rl/data
# rlx runs in a container, without SLURM's commands. It asks this script for them: rlx/runs/host_commands.py.
rlx_answer() {
  local folder word words
  trap : TERM # SLURM signals the script's processes too; these must say how a command ended
  while :; do
    IFS= read -r folder || continue
    (
      trap : TERM
      words=()
      while IFS= read -r -d '' word; do words+=("$word"); done <"$folder/words"
      while IFS= read -r -d '' word; do export "$word"; done <"$folder/variables"
      if [ -e "$folder/err" ]; then
        "${words[@]}" </dev/null >"$folder/out" 2>"$folder/err"
      else
        "${words[@]}" </dev/null >"$folder/out" 2>&1
      fi
      echo $? >"$folder/code"
    ) &
  done
}
rlx_tell() {
  echo "$1" >>"$RLX_OUTSIDE/told"
  if [ -e "$RLX_OUTSIDE/pid" ]; then kill -s "$1" "$(cat "$RLX_OUTSIDE/pid")"; fi
}
rlx_supervise() {
  local step answers code
  export RLX_OUTSIDE
  RLX_OUTSIDE=$(mktemp -d "${TMPDIR:-/tmp}/rlx.XXXXXXXX")
  mkfifo "$RLX_OUTSIDE/asked"
  set +e
  set -m # a process group of its own, so that one signal ends the answers with all that they have started
  rlx_answer <>"$RLX_OUTSIDE/asked" &
  answers=$!
  set +m
  disown "$answers" # else bash reports that it was killed
  trap 'rlx_tell USR2' USR2
  trap 'rlx_tell INT' TERM # because SLURM sends SIGTERM to the supervisor's step too, as a notice
  env -u SLURM_NTASKS -u SLURM_NPROCS -u SLURM_NTASKS_PER_NODE -u SLURM_TASKS_PER_NODE -u SLURM_NNODES -u SLURM_DISTRIBUTION -u SLURM_GPUS -u SLURM_GPUS_PER_NODE -u SLURM_GPUS_PER_TASK -u SLURM_GPUS_PER_SOCKET -u RANK -u LOCAL_RANK -u WORLD_SIZE -u LOCAL_WORLD_SIZE -u GROUP_RANK -u GROUP_WORLD_SIZE -u ROLE_RANK -u ROLE_WORLD_SIZE -u MASTER_ADDR -u MASTER_PORT srun --overlap --nodes=1 --ntasks=1 --job-name=supervisor --cpu-bind=none --mem=0 --input=none "--nodelist=${SLURMD_NODENAME:-$HOSTNAME}" --unbuffered --export=ALL --container-image=/lustre/team_rl/images/rlx.sqsh --container-mounts=/home/me/.cache:/home/me/.cache,/lustre/team_rl/hub:/lustre/team_rl/hub,/shared/outputs/mine:/shared/outputs/mine,/lustre/team_rl/data:/lustre/team_rl/data,"$RLX_OUTSIDE:$RLX_OUTSIDE" --container-workdir=/ --no-container-mount-home --no-container-entrypoint env ${PYTHONPATH+"PYTHONPATH=$PYTHONPATH"} ${PYTHONSAFEPATH+"PYTHONSAFEPATH=$PYTHONSAFEPATH"} ${PYTHONNOUSERSITE+"PYTHONNOUSERSITE=$PYTHONNOUSERSITE"} ${TRITON_CACHE_DIR+"TRITON_CACHE_DIR=$TRITON_CACHE_DIR"} ${HF_HOME+"HF_HOME=$HF_HOME"} ${HF_HUB_CACHE+"HF_HUB_CACHE=$HF_HUB_CACHE"} ${HF_DATASETS_CACHE+"HF_DATASETS_CACHE=$HF_DATASETS_CACHE"} ${HF_HUB_OFFLINE+"HF_HUB_OFFLINE=$HF_HUB_OFFLINE"} "$@" &
  step=$!
  while :; do
    wait "$step"
    code=$?
    kill -0 "$step" 2>/dev/null || break # else a signal ended the wait
  done
  kill -KILL -- "-$answers"
  rm -rf "$RLX_OUTSIDE"
  exit "$code"
}

# command
export SUBMITIT_EXECUTOR=slurm
rlx_supervise /opt/venv/bin/python -u -m submitit.core._submit /shared/outputs/mine/.submitit
