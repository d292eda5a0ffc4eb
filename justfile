# Commands of everyday work; `just` lists them. Each is one line that can be typed without just as well.

[private]
default:
    @just --list

# Build the release binary.
build:
    cargo build --release

# Run the tests, except the large suites.
test:
    cargo xtask test

# Run all tests.
test-all:
    cargo xtask test --all

# Run the tests of one crate: `just test-one xlaunch-pool plan`.
test-one crate *filter:
    cargo test --package {{crate}} {{filter}}

# Run the end-to-end tests, or one suite of them: `just e2e --test daemon`.
e2e *arguments:
    cargo test --package xlaunch-tests {{arguments}}

# Run the suites that need GPUs; tests/gpu/README.md says which record results.
gpu:
    cargo test --release --package xlaunch-engine --test cuda_ops
    cargo test --release --package xlaunch-pool --test cuda

# Format, lint and check the rules of this repository.
check:
    cargo fmt --all --check
    cargo clippy --workspace --all-targets --locked -- -D warnings
    cargo xtask check

# Regenerate the gRPC code after a change of proto/xlaunch/v1/*.proto.
proto:
    cargo xtask proto

# Run what CI runs.
gate:
    .ci/run
