//! The state of the screen, and its changes by keys and updates. Pure.

use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use xlaunch_proto::v1::{Job, NodeStatus};

use crate::render::jobs;
use xlaunch_daemon::view::has_ended;

#[derive(Debug)]
pub(super) enum Update {
    Snapshot(Box<Snapshot>),
    /// The reason why there is no snapshot.
    Error(String),
    /// The result of a command.
    Notice(String),
}

/// The state of the node at one moment.
#[derive(Debug, Default)]
pub(super) struct Snapshot {
    pub(super) node: NodeStatus,
    pub(super) jobs: Vec<Job>,
    /// The selected job with its ranks and history, which the list lacks.
    pub(super) detail: Option<Job>,
}

/// Effect of a key press beyond a change of the screen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Command {
    Nothing,
    Quit,
    Cancel(u64),
}

/// Everything needed to draw a frame.
#[derive(Debug)]
pub(super) struct State {
    snapshot: Snapshot,
    now_ms: u64,
    /// Index into the sorted jobs.
    cursor: usize,
    /// True if only the selected job is shown.
    zoomed: bool,
    /// The job to cancel once the user confirms.
    confirm: Option<u64>,
    error: String,
    notice: String,
    colours: bool,
}

impl State {
    pub(super) fn new(colours: bool) -> Self {
        Self {
            snapshot: Snapshot::default(),
            now_ms: 0,
            cursor: 0,
            zoomed: false,
            confirm: None,
            error: String::new(),
            notice: String::new(),
            colours,
        }
    }

    /// Applies an update. The selected job stays selected.
    pub(super) fn update(&mut self, update: Update) {
        match update {
            Update::Error(error) => self.error = error,
            Update::Notice(notice) => self.notice = notice,
            Update::Snapshot(mut snapshot) => {
                jobs::sort_by_state(&mut snapshot.jobs);
                let selected = self.selected();
                let place = snapshot.jobs.iter().position(|job| Some(job.id) == selected);
                let last = snapshot.jobs.len().saturating_sub(1);
                self.cursor = place.unwrap_or(self.cursor).min(last);
                self.error.clear();
                self.snapshot = *snapshot;
            }
        }
    }

    /// Sets the current time, in milliseconds since 1970.
    pub(super) fn set_time(&mut self, now_ms: u64) {
        self.now_ms = now_ms;
    }

    pub(super) fn key(&mut self, key: KeyEvent) -> Command {
        if key.kind == KeyEventKind::Release {
            return Command::Nothing;
        }
        if key.modifiers.contains(KeyModifiers::CONTROL) {
            // In raw mode Ctrl-C arrives as a key, not as SIGINT.
            return if key.code == KeyCode::Char('c') { Command::Quit } else { Command::Nothing };
        }
        if let Some(job) = self.confirm.take() {
            return if matches!(key.code, KeyCode::Char('y' | 'Y')) {
                Command::Cancel(job)
            } else {
                Command::Nothing
            };
        }
        self.notice.clear();
        let last = self.snapshot.jobs.len().saturating_sub(1);
        match key.code {
            KeyCode::Char('q') => return Command::Quit,
            KeyCode::Esc if !self.zoomed => return Command::Quit,
            KeyCode::Esc => self.zoomed = false,
            KeyCode::Enter => self.zoomed = !self.zoomed && self.selected().is_some(),
            KeyCode::Up | KeyCode::Char('k') => self.cursor = self.cursor.saturating_sub(1),
            KeyCode::Down | KeyCode::Char('j') => self.cursor = (self.cursor + 1).min(last),
            KeyCode::Home => self.cursor = 0,
            KeyCode::End => self.cursor = last,
            KeyCode::Char('c') => match self.job().filter(|job| !has_ended(job.state())) {
                Some(job) => self.confirm = Some(job.id),
                None => self.notice = "nothing to cancel: the job has ended".into(),
            },
            _ => {}
        }
        Command::Nothing
    }

    pub(super) fn node(&self) -> &NodeStatus {
        &self.snapshot.node
    }

    pub(super) fn jobs(&self) -> &[Job] {
        &self.snapshot.jobs
    }

    pub(super) fn cursor(&self) -> usize {
        self.cursor
    }

    /// Returns the number of the selected job.
    pub(super) fn selected(&self) -> Option<u64> {
        self.job().map(|job| job.id)
    }

    /// Returns the selected job, with its details once they have arrived.
    pub(super) fn job(&self) -> Option<&Job> {
        let job = self.snapshot.jobs.get(self.cursor)?;
        Some(self.snapshot.detail.as_ref().filter(|detail| detail.id == job.id).unwrap_or(job))
    }

    pub(super) fn is_zoomed(&self) -> bool {
        self.zoomed
    }

    pub(super) fn now_ms(&self) -> u64 {
        self.now_ms
    }

    pub(super) fn has_colours(&self) -> bool {
        self.colours
    }

    #[cfg(test)]
    pub(super) fn without_colours(&mut self) {
        self.colours = false;
    }

    /// Returns the last line: a question, an error, the result of a command, or the keys.
    pub(super) fn last_line(&self) -> String {
        match self.confirm {
            Some(job) => format!("cancel job {job}?  y: yes, any other key: no"),
            None if !self.error.is_empty() => self.error.clone(),
            None if !self.notice.is_empty() => self.notice.clone(),
            None if self.zoomed => "esc: all jobs  j, k: next, previous  c: cancel  q: quit".into(),
            None => "j, k, arrows: select  enter: this job only  c: cancel  q: quit".into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use xlaunch_proto::v1::NodeJobState;

    use super::*;

    fn state(jobs: &[(u64, NodeJobState)]) -> State {
        let mut state = State::new(true);
        state.update(snapshot(jobs));
        state
    }

    fn snapshot(jobs: &[(u64, NodeJobState)]) -> Update {
        let jobs = jobs.iter().map(|&(id, state)| Job { id, state: state.into(), ..Default::default() });
        Update::Snapshot(Box::new(Snapshot { jobs: jobs.collect(), ..Default::default() }))
    }

    fn press(state: &mut State, keys: &str) -> Vec<Command> {
        keys.chars()
            .map(|key| {
                let code = match key {
                    '\n' => KeyCode::Enter,
                    '\u{1b}' => KeyCode::Esc,
                    key => KeyCode::Char(key),
                };
                state.key(code.into())
            })
            .collect()
    }

    const TWO: [(u64, NodeJobState); 2] = [(1, NodeJobState::Running), (2, NodeJobState::Running)];

    #[test]
    fn selection_follows_its_job() {
        let mut state = state(&TWO);
        press(&mut state, "jjj");
        assert_eq!(state.selected(), Some(2));
        state.update(snapshot(&[(0, NodeJobState::Running), TWO[0], TWO[1], (3, NodeJobState::Running)]));
        assert_eq!(state.selected(), Some(2));
        state.update(snapshot(&TWO[..1]));
        assert_eq!(state.selected(), Some(1));
        state.update(snapshot(&[]));
        assert_eq!(state.selected(), None);
        assert_eq!(press(&mut state, "jk\nc"), [Command::Nothing; 4]);
    }

    #[test]
    fn cancel_needs_confirmation() {
        let mut state = state(&TWO);
        assert_eq!(press(&mut state, "cn"), [Command::Nothing; 2]);
        assert_eq!(press(&mut state, "c"), [Command::Nothing]);
        assert!(state.last_line().contains("cancel job 1?"));
        // The list changes while the user is asked to confirm.
        state.update(snapshot(&TWO[1..]));
        assert_eq!(press(&mut state, "y"), [Command::Cancel(1)]);
        assert_eq!(press(&mut state, "y"), [Command::Nothing]);
        // `q` does not confirm.
        assert_eq!(press(&mut state, "cq"), [Command::Nothing; 2]);
    }

    #[test]
    fn ended_job_cannot_be_cancelled() {
        let mut state = state(&[(1, NodeJobState::Done)]);
        assert_eq!(press(&mut state, "cy"), [Command::Nothing; 2]);
    }

    #[test]
    fn escape_leaves_the_zoomed_job_before_it_quits() {
        let mut state = state(&TWO);
        press(&mut state, "\n");
        assert!(state.is_zoomed());
        assert_eq!(press(&mut state, "\u{1b}\u{1b}"), [Command::Nothing, Command::Quit]);
        assert_eq!(press(&mut state, "q"), [Command::Quit]);
        let control_c = KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL);
        assert_eq!(state.key(control_c), Command::Quit);
    }

    #[test]
    fn error_is_shown_until_the_next_snapshot() {
        let mut state = state(&TWO);
        state.update(Update::Error("it is being restarted".into()));
        assert_eq!(state.last_line(), "it is being restarted");
        assert_eq!(state.jobs().len(), 2);
        state.update(snapshot(&TWO));
        assert!(state.last_line().contains("quit"));
    }
}
