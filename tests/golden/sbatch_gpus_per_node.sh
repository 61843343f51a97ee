#!/bin/bash

# Parameters
#SBATCH --cpus-per-task=32
#SBATCH --gpus-per-node=4
#SBATCH --job-name=mine
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --open-mode=append
#SBATCH --output=/shared/outputs/mine/.submitit/%j_0_log.out
#SBATCH --partition=short,preemptible
#SBATCH --qos=normal
#SBATCH --requeue
#SBATCH --signal=B:USR2@120
#SBATCH --time=240

# setup
rlx_base=/shared/outputs/mine
rlx_runs=(.)
rlx_output=.submitit
rlx_last=20
trap '' USR2 # the notice would kill the job before Python handles it
# If the job ends before rlx runs, this writes the reason into the run's status.json and keeps the job's output in its logs.
rlx_job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
rlx_job=${rlx_job:-$SLURM_JOB_ID}
rlx_run=$rlx_base/${rlx_runs[${SLURM_ARRAY_TASK_ID:-0}]}
rlx_end() {
  local code=$? attempt=0 log line lines= reason
  set +e
  if [ -e "$rlx_run/job.json" ] && ! grep -qF "\"id\": \"$rlx_job\"" "$rlx_run/job.json"; then return; fi # now another job's
  if grep -q '^ "state": "completed"' "$rlx_run/status.json"; then return; fi
  while [ -e "$rlx_run/logs/attempt_$attempt" ]; do attempt=$((attempt + 1)); done
  log=logs/attempt_$attempt/job.log
  mkdir -p "$rlx_run/logs/attempt_$attempt"
  ln -sfn "attempt_$attempt" "$rlx_run/logs/latest"
  cp "$rlx_base/$rlx_output/${rlx_job}_0_log.out" "$rlx_run/$log"
  while IFS= read -r line; do
    lines="$lines${lines:+, }\"$line\""
  done < <(tr -cd '\12\40-\176' <"$rlx_run/$log" | grep . | tail -n "$rlx_last" | sed 's/[\\"]/\\&/g') # bash 4.2 replaces differently
  reason="SLURM job $rlx_job ended on ${SLURMD_NODENAME:-$HOSTNAME} with exit code $code before rlx could start:"
  reason="$reason a line of slurm.setup failed, or Python cannot import rlx there"
  while IFS= read -r line; do
    case $line in
      ' "state":'*) line=' "state": "failed",' ;;
      ' "attempt":'*) line=" \"attempt\": $attempt," ;;
      ' "exit_code":'*) line=' "exit_code": 1,' ;;
      ' "cause":'*)
        if [ "$line" = ' "cause": {' ]; then while IFS= read -r line && [ "$line" != ' },' ]; do :; done; fi
        line=' "cause": {"role": "launcher", "replica": 0, "returncode": '"$code"', "reason": "'"$reason"'",'
        line="$line \"log\": \"$log\", \"last_lines\": [$lines]},"
        ;;
      ' "job":'*) line=" \"job\": \"$rlx_job\"," ;;
      ' "updated":'*) line=" \"updated\": $(date +%s)" ;;
    esac
    printf '%s\n' "$line"
  done <"$rlx_run/status.json" >"$rlx_run/.status.json.$$" && mv "$rlx_run/.status.json.$$" "$rlx_run/status.json"
}
trap rlx_end EXIT
trap 'trap - EXIT; exit 143' TERM # cancelled or requeued: SLURM knows it
set -e
cd /
export PYTHONPATH=/shared/outputs/mine/.submitit/code_1:/
export PYTHONSAFEPATH=1
source /etc/profile.d/modules.sh
module load gcc/13 cuda/12.8
case "${PYTHONPATH-}" in /shared/outputs/mine/.submitit/code_1*) ;; *) export PYTHONPATH=/shared/outputs/mine/.submitit/code_1"${PYTHONPATH:+:$PYTHONPATH}":/ ;; esac
export PYTHONSAFEPATH=1
PYTHON -c 'import rlx.launch.slurm'

# command
export SUBMITIT_EXECUTOR=slurm
exec PYTHON -u -m submitit.core._submit /shared/outputs/mine/.submitit
