//! `--preload`: imports modules before the first attempt, and forks workers instead of spawning them.
//!
//! Workers are started without it if anything goes wrong: preloading only saves time.

use std::collections::BTreeSet;

use tokio::sync::mpsc;

use super::Driver;
use crate::python::preload::{Imported, PreloadPlan, Preloader};
use xlaunch_host::spawn::process_tree::ProcessTree;
use xlaunch_host::spawn::{Options, Spawned};

impl Driver<'_> {
    /// Starts the preloading process. The node is ready for its first attempt when the imports are done.
    pub(super) async fn preload(&mut self, plan: PreloadPlan, imported: mpsc::UnboundedSender<Imported>) {
        self.importing = true;
        let reason = format!("importing {}", plan.modules.join(", "));
        self.board.send_modify(|board| board.set_reason(&reason));
        let failed = imported.clone();
        match Preloader::start(plan, self.workload.base_environment(), &self.run.id, &self.spawner, imported)
            .await
        {
            Ok(preloader) => {
                self.preloader = Some(preloader);
                self.publish_state();
            }
            Err(error) => {
                let reason = Err(error.to_string());
                // Cannot fail: the driver's task has the receiver.
                let _ = failed.send(Imported { output: String::new(), omitted: 0, threads: reason });
            }
        }
    }

    /// Handles the end of the imports, successful or not.
    pub(super) fn imported(&mut self, imported: Imported) {
        for line in imported.output.lines() {
            self.workload.notify(&format!("[preload] {line}"));
        }
        if imported.omitted > 0 {
            self.notify(&format!("{} more bytes of import output were dropped", imported.omitted));
        }
        match imported.threads {
            Ok(threads) if threads.is_empty() => {}
            Ok(threads) => self.notify(&format!(
                "preloading left threads running that forked workers will not have: {}",
                counted(&threads)
            )),
            Err(reason) => {
                self.notify(&without(&reason));
                self.preloader.iter_mut().for_each(Preloader::give_up);
            }
        }
        self.board.send_modify(|board| board.set_reason(""));
        self.importing = false;
        // The members may have changed in the meantime.
        self.prepare_attempt(self.membership.prepare());
    }

    /// Forks a worker if there is a preloading process; `None` if it has to be spawned.
    pub(super) async fn fork_worker(
        &mut self,
        processes: &ProcessTree,
        rank: u32,
        command: &std::process::Command,
        options: &Options,
    ) -> Option<Spawned> {
        let preloader = self.preloader.as_mut().filter(|preloader| preloader.is_usable())?;
        let base = self.workload.base_environment();
        match preloader.fork(command, base, options, processes.cgroup_of(rank)).await {
            Ok(spawned) => Some(spawned),
            Err(error) => {
                self.notify(&without(&format!("the preloading process cannot fork workers: {error}")));
                None
            }
        }
    }
}

/// Lists thread names with their counts: `pt_main, python3 (31 times)`.
fn counted(threads: &[String]) -> String {
    let names: BTreeSet<&String> = threads.iter().collect();
    let counted = names.into_iter().map(|name| match threads.iter().filter(|other| *other == name).count() {
        1 => name.clone(),
        count => format!("{name} ({count} times)"),
    });
    counted.collect::<Vec<_>>().join(", ")
}

fn without(reason: &str) -> String {
    format!("preloading failed: {reason}; starting workers without it")
}
