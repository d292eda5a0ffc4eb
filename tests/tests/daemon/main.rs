//! The node's daemon: jobs, crashes, a full disk, GPUs, hostile users, its web page, and the load generator.

#![expect(clippy::unwrap_used, reason = "tests")]

mod crashes;
mod damage;
mod examinations;
mod full_disk;
mod gpus;
mod history;
mod hooks;
mod hostile;
mod hostile_actions;
mod jobs;
mod load;
mod page;
mod restarts;
mod scheduling;
mod task_limit;
mod users;

xlaunch_harness::suite! {
    threads_per_core 3;
    modules crashes, damage, examinations, full_disk, gpus, history, hooks, hostile, hostile_actions, jobs, load, page,
        restarts, scheduling, task_limit, users;
}
