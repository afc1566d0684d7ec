#!/bin/sh
# Before the files go: the service stops when the package is removed, and stays when it is replaced by another version.
# dpkg says `remove` or `upgrade`, rpm how many versions will be left.
set -e

case "$1" in
remove | 0) ;;
*) exit 0 ;;
esac

if [ -d /run/systemd/system ]; then
    systemctl --no-reload disable --now warpwatch.service
fi
