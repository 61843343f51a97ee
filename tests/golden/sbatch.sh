#!/bin/bash

# Parameters
#SBATCH --account=my_project
#SBATCH --array=0-11%4
#SBATCH --comment='reinforcement learning'
#SBATCH --exclusive
#SBATCH --gres=gpu:8
#SBATCH --job-name=losses
#SBATCH --mem=0
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --open-mode=append
#SBATCH --output=/shared/outputs/losses/.submitit/%A_%a_0_log.out
#SBATCH --partition=gpu
#SBATCH --requeue
#SBATCH --signal=B:USR2@180
#SBATCH --time=1440

# setup
trap '' USR2 # the notice would kill the job before Python handles it
set -e
cd /
module load cuda
export NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0
PYTHON -c 'import rlx.launch.slurm'

# command
export SUBMITIT_EXECUTOR=slurm
exec PYTHON -u -m submitit.core._submit /shared/outputs/losses/.submitit
