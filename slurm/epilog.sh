#!/bin/sh
# Slurm epilog: removes the job file that prolog.sh wrote. See README.md beside it.
#
#     epilog.sh [FOLDER]              /run/warpwatch/jobs.d where not given
#
# Never fails the job: the exit status is 0.

PATH=/usr/sbin:/usr/bin:/sbin:/bin # Slurm gives epilogs none
export PATH
folder=${1:-/run/warpwatch/jobs.d}

case $SLURM_JOB_ID in
'' | *[!0-9]*)
    echo "warpwatch epilog: SLURM_JOB_ID is no number" >&2
    exit 0
    ;;
esac
rm -f "$folder/slurm-$SLURM_JOB_ID.json" "$folder/.slurm-$SLURM_JOB_ID".* ||
    echo "warpwatch epilog: $folder/slurm-$SLURM_JOB_ID.json cannot be removed" >&2
exit 0
