#!/bin/sh
# Installs what a private container engine needs (paperclip_env/stack/engine.py). Again and again is fine. Root only.
set -eu

if [ "$(id -u)" != 0 ]; then
    echo "engine.sh: must be run by root" >&2
    exit 1
fi

packages="podman runc busybox-static openssl"
missing=""
for package in $packages; do
    [ "$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null)" = installed ] || missing="$missing $package"
done
[ -n "$missing" ] || exit 0

export DEBIAN_FRONTEND=noninteractive
apt-get update -q
# shellcheck disable=SC2086 -- a list of packages
apt-get install -q -y --no-install-recommends $missing
