#!/bin/sh
# Builds the Debian package and prints its path: deploy/package.sh [PROFILE]
# PROFILE is the cargo profile, `release` by default; packages of `dev` are for tests and compressed less.
# Installs cargo-deb if it is missing.
set -eu
cd "$(dirname "$0")/.."
profile=${1:-release}
target=$(cargo metadata --no-deps --format-version 1 | sed -n 's/.*"target_directory":"\([^"]*\)".*/\1/p')
case $profile in
    dev) build=$target/debug fast=--fast ;;
    *) build=$target/$profile fast= ;;
esac

command -v cargo-deb > /dev/null || cargo install --locked cargo-deb >&2

cargo build --locked --package xlaunch --bin xlaunch --profile "$profile" >&2

# Man pages and completions; [package.metadata.deb] in launcher/Cargo.toml picks them up here.
generated=$build/package
rm -rf "$generated"
mkdir -p "$generated/man"
"$build/xlaunch" gen man "$generated/man" >&2
for shell in bash zsh fish; do
    "$build/xlaunch" gen completions $shell > "$generated/xlaunch.$shell"
done

# Reproducible: timestamps come from the commit.
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct 2> /dev/null || date +%s)
export SOURCE_DATE_EPOCH
cargo deb --quiet --locked --no-build --package xlaunch --profile "$profile" $fast
