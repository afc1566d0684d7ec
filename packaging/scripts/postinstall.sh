#!/bin/sh
# After the files are there: the user and the folders; a running service is restarted, a stopped one is left alone.
# dpkg calls it as `postinst configure [OLD-VERSION]`, rpm with 1 at the first installation and 2 at an upgrade.
set -e

case "$1" in
configure | 1 | 2) ;;
*) exit 0 ;;
esac

systemd-sysusers /usr/lib/sysusers.d/warpwatch.conf
systemd-tmpfiles --create /usr/lib/tmpfiles.d/warpwatch.conf

if [ -d /run/systemd/system ]; then
    systemctl daemon-reload
    systemctl try-restart warpwatch.service
fi
