#!/bin/bash

# Parameters
#SBATCH --account=nlp_lab
#SBATCH --exclusive
#SBATCH --gres=gpu:a100:8
#SBATCH --job-name=mine
#SBATCH --mem=0
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --open-mode=append
#SBATCH --output=/shared/outputs/mine/.submitit/%j_0_log.out
#SBATCH --partition=gpu
#SBATCH --requeue
#SBATCH --signal=B:USR2@120
#SBATCH --time=2880

# setup
trap '' USR2 # the notice would kill the job before Python handles it
set -e
cd /
export PYTHONPATH=/shared/outputs/mine/.submitit/code_1:/
export PYTHONSAFEPATH=1
module load cuda/12.8
export NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0
case "${PYTHONPATH-}" in /shared/outputs/mine/.submitit/code_1*) ;; *) export PYTHONPATH=/shared/outputs/mine/.submitit/code_1"${PYTHONPATH:+:$PYTHONPATH}":/ ;; esac
export PYTHONSAFEPATH=1
PYTHON -c 'import rlx.launch.slurm'

# command
export SUBMITIT_EXECUTOR=slurm
exec PYTHON -u -m submitit.core._submit /shared/outputs/mine/.submitit
