//! The CPU back end.
