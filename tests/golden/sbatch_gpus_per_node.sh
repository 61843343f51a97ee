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
trap '' USR2 # the notice would kill the job before Python handles it
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
