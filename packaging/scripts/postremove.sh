#!/bin/sh
# After the files are gone. What the agent learned stays until the package is purged; the user stays, as users do.
# dpkg says `remove`, `purge` or `upgrade`, rpm how many versions are left.
set -e

if [ "$1" = purge ]; then
    rm -rf /var/lib/warpwatch
fi

case "$1" in
remove | purge | 0)
    # Job files belong to running jobs and their launchers; the agent's own folder goes.
    rm -rf /run/warpwatch/agent
    find /opt/warpwatch -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true
    ;;
esac

if [ -d /run/systemd/system ]; then
    systemctl daemon-reload
fi
