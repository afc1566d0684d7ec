#!/bin/sh
# Slurm prolog: writes the job file of warpwatch, which says which GPUs this job was given. See README.md beside it.
#
#     prolog.sh [FOLDER [PROC]]       /run/warpwatch/jobs.d and /proc where not given
#
# Never fails the job: what goes wrong is said on standard error, and the exit status is 0. Starts no driver call.

PATH=/usr/sbin:/usr/bin:/sbin:/bin # Slurm gives prologs none
export PATH
LC_ALL=C # ranges of characters are those of ASCII
export LC_ALL
umask 022 # the agent is another user
folder=${1:-/run/warpwatch/jobs.d}
proc=${2:-/proc}

give_up() {
    echo "warpwatch prolog: $1" >&2
    exit 0
}

# is_number TEXT: 1 to 19 digits, without a leading zero, which arithmetic takes for octal
is_number() {
    case $1 in
    '' | *[!0-9]* | 0?* | ????????????????????*) return 1 ;;
    esac
}

# is_name TEXT: 1 to 64 characters that need no quoting in JSON
is_name() {
    case $1 in
    '' | *[!A-Za-z0-9._@+-]*) return 1 ;;
    esac
    test "${#1}" -le 64
}

hex='[0-9A-Fa-f]'
hex4=$hex$hex$hex$hex
uuid=$hex4$hex4-$hex4-$hex4-$hex4-$hex4$hex4$hex4

# is_uuid TEXT: the UUID of a GPU or MIG instance; drivers before R470 write MIG-GPU-<uuid>/<GPU instance>/<instance>
is_uuid() {
    # shellcheck disable=SC2254 # the variable holds a pattern
    case $1 in
    GPU-$uuid | MIG-$uuid) return 0 ;;
    MIG-GPU-$uuid/*/*) ;;
    *) return 1 ;;
    esac
    ids=${1#*/}
    case ${ids%%/*},${ids#*/} in
    ?????*,* | *,?????*) return 1 ;;
    esac
    is_number "${ids%%/*}" && is_number "${ids#*/}"
}

# is_uuid_list TEXT: UUIDs alone, with commas between them; one that is malformed makes the whole list worthless
is_uuid_list() {
    case $1 in
    '' | *[!A-Za-z0-9,/-]*) return 1 ;;
    esac
    old_ifs=$IFS
    IFS=,
    for item in $1; do
        if ! is_uuid "$item"; then
            IFS=$old_ifs
            return 1
        fi
    done
    IFS=$old_ifs
}

# quoted LIST: a list with commas as the items of a JSON list
quoted() {
    old_ifs=$IFS
    IFS=,
    separator=
    for item in $1; do
        printf '%s"%s"' "$separator" "$item"
        separator=,
    done
    IFS=$old_ifs
}

# all_numbers LIST: the numbers of a Slurm list, 0,2-4, with blanks between them
all_numbers() {
    old_ifs=$IFS
    IFS=,
    for item in $1; do
        first=${item%%-*}
        last=${item##*-}
        if is_number "$first" && is_number "$last" && test "${#first}" -le 3 && test "${#last}" -le 3; then
            while test "$first" -le "$last"; do
                printf '%s ' "$first"
                first=$((first + 1))
            done
        fi
    done
    IFS=$old_ifs
}

# addresses LIST: PCI addresses, with commas, of the GPUs whose device minors a Slurm list holds
addresses() {
    wanted=" $(all_numbers "$1")"
    separator=
    for information in "$proc"/driver/nvidia/gpus/*/information; do
        test -r "$information" || continue
        minor=
        address=
        while IFS= read -r line; do
            value=${line#*:}
            value=${value##*[[:space:]]}
            case $line in
            'Bus Location:'*) address=$value ;;
            'Device Minor:'*) minor=$value ;;
            esac
        done <"$information"
        case $address in
        '' | *[!0-9A-Fa-f:.]*) continue ;;
        esac
        case $wanted in
        *" $minor "*)
            printf '%s%s' "$separator" "$address"
            separator=,
            ;;
        esac
    done
}

# has_mig: whether a GPU of this node is divided; Slurm counts instances then, and its numbers are no device minors
has_mig() {
    for instance in "$proc"/driver/nvidia/capabilities/gpu*/mig/gi*; do
        test -e "$instance" && return 0
    done
    return 1
}

is_number "$SLURM_JOB_ID" || give_up "SLURM_JOB_ID is no number"
job_key=slurm:$SLURM_JOB_ID
is_name "$SLURM_CLUSTER_NAME" && job_key=slurm:$SLURM_CLUSTER_NAME/$SLURM_JOB_ID

user=
if is_name "$SLURM_JOB_USER"; then
    user=$SLURM_JOB_USER
elif is_number "$SLURM_JOB_UID"; then
    user=$SLURM_JOB_UID
fi

# From Slurm 25.11 on CUDA_VISIBLE_DEVICES holds UUIDs. SLURM_JOB_GPUS holds the numbers of the device files, /dev/nvidia2
# for 2: the minors, which on some boards are neither the order of nvidia-smi nor that of the PCI addresses.
gpus=
if is_uuid_list "$CUDA_VISIBLE_DEVICES"; then
    gpus=$CUDA_VISIBLE_DEVICES
elif test -n "$SLURM_JOB_GPUS" && ! has_mig; then
    gpus=$(addresses "$SLURM_JOB_GPUS")
fi
if test -z "$gpus"; then
    test -n "$SLURM_JOB_GPUS" || exit 0 # a job without GPUs
    echo "warpwatch prolog: the GPUs of job $SLURM_JOB_ID are not known by UUID or PCI address; its processes name it" >&2
fi

text="{\"job_key\":\"$job_key\",\"job_id\":\"$SLURM_JOB_ID\",\"scheduler\":\"slurm\""
test -z "$user" || text="$text,\"user\":\"$user\""
test -z "$gpus" || text="$text,\"gpus\":[$(quoted "$gpus")]"

# What the user declares: sbatch --comment="workload=training checkpoint=1800". Of what stands there twice the last counts.
workload=
checkpoint=
set -f
for word in $SLURM_JOB_COMMENT; do
    case $word in
    workload=training | workload=inference | workload=idle | workload=other) workload=${word#workload=} ;;
    checkpoint=[1-9]*)
        seconds=${word#checkpoint=}
        if is_number "$seconds" && test "${#seconds}" -le 7 && test "$seconds" -le 2678400; then
            checkpoint=$seconds
        fi
        ;;
    esac
done
set +f
test -z "$workload" || text="$text,\"workload\":\"$workload\""
test -z "$checkpoint" || text="$text,\"expected_checkpoint_seconds\":$checkpoint"

# Should the epilog never come. A day more, for a job whose time limit is raised.
if is_number "$SLURM_JOB_END_TIME" && test "${#SLURM_JOB_END_TIME}" -le 10 && test "$SLURM_JOB_END_TIME" -gt 0; then
    text="$text,\"expires\":$((SLURM_JOB_END_TIME + 86400))"
fi

mkdir -p "$folder" 2>/dev/null
test -d "$folder" || give_up "$folder is not there and cannot be made"
target=$folder/slurm-$SLURM_JOB_ID.json
new=$(mktemp "$folder/.slurm-$SLURM_JOB_ID.XXXXXXXX") || give_up "no file can be made in $folder"
# mktemp made it for us alone; rename takes the place of whatever bears the name, a link included.
if printf '%s}\n' "$text" >"$new" && chmod 644 "$new" && mv -f -T "$new" "$target"; then
    exit 0
fi
rm -f "$new"
give_up "$target cannot be written"
