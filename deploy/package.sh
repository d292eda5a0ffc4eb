#!/bin/sh
# Builds the Debian package, and prints its path: deploy/package.sh [PROFILE]
# PROFILE is cargo's, `release` where none is given; packages of `dev` are for tests, and compressed less.
# Needs cargo-deb, which it installs where it is missing.
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

# What the binary says of itself; [package.metadata.deb] of launcher/Cargo.toml takes it from here.
generated=$build/package
rm -rf "$generated"
mkdir -p "$generated/man"
"$build/xlaunch" gen man "$generated/man" >&2
for shell in bash zsh fish; do
    "$build/xlaunch" gen completions $shell > "$generated/xlaunch.$shell"
done

# Paths and contents follow from the commit alone.
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct 2> /dev/null || date +%s)
export SOURCE_DATE_EPOCH
cargo deb --quiet --locked --no-build --package xlaunch --profile "$profile" $fast
