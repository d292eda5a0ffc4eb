#!/bin/sh
# Builds a Debian package for systems like this one and prints its path: deploy/package.sh [--fast]
# --fast compresses less, for tests.
# Installs cargo-deb if it is missing.
set -eu
cd "$(dirname "$0")/.."
target=$(cargo metadata --no-deps --format-version 1 | sed -n 's/.*"target_directory":"\([^"]*\)".*/\1/p')
build=$target/release

command -v cargo-deb > /dev/null || cargo install --locked cargo-deb >&2

cargo build --locked --release --package xlaunch --bin xlaunch >&2

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
cargo deb --quiet --locked --no-build --package xlaunch "$@"
