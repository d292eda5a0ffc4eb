//! What is shown, and what keys and news make of it. Pure.

use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use xlaunch_proto::v1::{Job, NodeStatus};

use crate::cli::node::jobs;
use xlaunch_daemon::view::has_ended;

/// Something new from the daemon.
#[derive(Debug)]
pub(super) enum News {
    Snapshot(Box<Snapshot>),
    /// Why there is none.
    Problem(String),
    /// What has become of an order.
    Notice(String),
}

/// The node at one moment.
#[derive(Debug, Default)]
pub(super) struct Snapshot {
    pub(super) node: NodeStatus,
    pub(super) jobs: Vec<Job>,
    /// The job that was selected, in full.
    pub(super) detail: Option<Job>,
}

/// What is to be done besides showing the state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Act {
    Nothing,
    Quit,
    Cancel(u64),
}

/// Everything that a frame shows.
#[derive(Debug)]
pub(super) struct State {
    snapshot: Snapshot,
    now_ms: u64,
    /// Of the jobs as they are sorted.
    cursor: usize,
    /// The selected job has the terminal for itself.
    alone: bool,
    /// The job whose end is asked for, until that is confirmed.
    confirm: Option<u64>,
    problem: String,
    notice: String,
    colours: bool,
}

impl State {
    pub(super) fn new(colours: bool) -> Self {
        Self {
            snapshot: Snapshot::default(),
            now_ms: 0,
            cursor: 0,
            alone: false,
            confirm: None,
            problem: String::new(),
            notice: String::new(),
            colours,
        }
    }

    /// Takes what is new. The selection stays with its job.
    pub(super) fn take(&mut self, news: News) {
        match news {
            News::Problem(problem) => self.problem = problem,
            News::Notice(notice) => self.notice = notice,
            News::Snapshot(mut snapshot) => {
                jobs::sort(&mut snapshot.jobs);
                let selected = self.selected();
                let place = snapshot.jobs.iter().position(|job| Some(job.id) == selected);
                let last = snapshot.jobs.len().saturating_sub(1);
                self.cursor = place.unwrap_or(self.cursor).min(last);
                self.problem.clear();
                self.snapshot = *snapshot;
            }
        }
    }

    /// It is so late, in milliseconds since 1970.
    pub(super) fn now(&mut self, now_ms: u64) {
        self.now_ms = now_ms;
    }

    /// A key is pressed.
    pub(super) fn key(&mut self, key: KeyEvent) -> Act {
        if key.kind == KeyEventKind::Release {
            return Act::Nothing;
        }
        if key.modifiers.contains(KeyModifiers::CONTROL) {
            // Raw mode has no other way to say it.
            return if key.code == KeyCode::Char('c') { Act::Quit } else { Act::Nothing };
        }
        if let Some(job) = self.confirm.take() {
            return if matches!(key.code, KeyCode::Char('y' | 'Y')) {
                Act::Cancel(job)
            } else {
                Act::Nothing
            };
        }
        self.notice.clear();
        let last = self.snapshot.jobs.len().saturating_sub(1);
        match key.code {
            KeyCode::Char('q') => return Act::Quit,
            KeyCode::Esc if !self.alone => return Act::Quit,
            KeyCode::Esc => self.alone = false,
            KeyCode::Enter => self.alone = !self.alone && self.selected().is_some(),
            KeyCode::Up | KeyCode::Char('k') => self.cursor = self.cursor.saturating_sub(1),
            KeyCode::Down | KeyCode::Char('j') => self.cursor = (self.cursor + 1).min(last),
            KeyCode::Home => self.cursor = 0,
            KeyCode::End => self.cursor = last,
            KeyCode::Char('c') => match self.job().filter(|job| !has_ended(job.state())) {
                Some(job) => self.confirm = Some(job.id),
                None => self.notice = "there is nothing to cancel: it has ended".into(),
            },
            _ => {}
        }
        Act::Nothing
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

    /// The number of the selected job.
    pub(super) fn selected(&self) -> Option<u64> {
        self.job().map(|job| job.id)
    }

    /// The selected job, in full as soon as it is known.
    pub(super) fn job(&self) -> Option<&Job> {
        let job = self.snapshot.jobs.get(self.cursor)?;
        Some(self.snapshot.detail.as_ref().filter(|detail| detail.id == job.id).unwrap_or(job))
    }

    pub(super) fn is_alone(&self) -> bool {
        self.alone
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

    /// The last line: a question, what went wrong, what was done, or the keys.
    pub(super) fn last_line(&self) -> String {
        match self.confirm {
            Some(job) => format!("cancel job {job}?  y: yes, any other key: no"),
            None if !self.problem.is_empty() => self.problem.clone(),
            None if !self.notice.is_empty() => self.notice.clone(),
            None if self.alone => "esc: all jobs  j, k: next, previous  c: cancel  q: quit".into(),
            None => "j, k, arrows: select  enter: this job alone  c: cancel  q: quit".into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use xlaunch_proto::v1::NodeJobState;

    use super::*;

    fn state(jobs: &[(u64, NodeJobState)]) -> State {
        let mut state = State::new(true);
        state.take(snapshot(jobs));
        state
    }

    fn snapshot(jobs: &[(u64, NodeJobState)]) -> News {
        let jobs = jobs.iter().map(|&(id, state)| Job { id, state: state.into(), ..Default::default() });
        News::Snapshot(Box::new(Snapshot { jobs: jobs.collect(), ..Default::default() }))
    }

    fn press(state: &mut State, keys: &str) -> Vec<Act> {
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
    fn the_selection_stays_with_its_job() {
        let mut state = state(&TWO);
        press(&mut state, "jjj");
        assert_eq!(state.selected(), Some(2));
        state.take(snapshot(&[(0, NodeJobState::Running), TWO[0], TWO[1], (3, NodeJobState::Running)]));
        assert_eq!(state.selected(), Some(2));
        state.take(snapshot(&TWO[..1]));
        assert_eq!(state.selected(), Some(1));
        state.take(snapshot(&[]));
        assert_eq!(state.selected(), None);
        assert_eq!(press(&mut state, "jk\nc"), [Act::Nothing; 4]);
    }

    #[test]
    fn a_job_is_cancelled_only_after_a_yes() {
        let mut state = state(&TWO);
        assert_eq!(press(&mut state, "cn"), [Act::Nothing; 2]);
        assert_eq!(press(&mut state, "c"), [Act::Nothing]);
        assert!(state.last_line().contains("cancel job 1?"));
        // The list moves under the question.
        state.take(snapshot(&TWO[1..]));
        assert_eq!(press(&mut state, "y"), [Act::Cancel(1)]);
        assert_eq!(press(&mut state, "y"), [Act::Nothing]);
        // Quitting is no yes.
        assert_eq!(press(&mut state, "cq"), [Act::Nothing; 2]);
    }

    #[test]
    fn what_has_ended_cannot_be_cancelled() {
        let mut state = state(&[(1, NodeJobState::Done)]);
        assert_eq!(press(&mut state, "cy"), [Act::Nothing; 2]);
    }

    #[test]
    fn escape_leaves_the_job_first_and_then_the_program() {
        let mut state = state(&TWO);
        press(&mut state, "\n");
        assert!(state.is_alone());
        assert_eq!(press(&mut state, "\u{1b}\u{1b}"), [Act::Nothing, Act::Quit]);
        assert_eq!(press(&mut state, "q"), [Act::Quit]);
        let control_c = KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL);
        assert_eq!(state.key(control_c), Act::Quit);
    }

    #[test]
    fn a_daemon_that_is_away_is_said_until_it_is_back() {
        let mut state = state(&TWO);
        state.take(News::Problem("it is being restarted".into()));
        assert_eq!(state.last_line(), "it is being restarted");
        assert_eq!(state.jobs().len(), 2);
        state.take(snapshot(&TWO));
        assert!(state.last_line().contains("quit"));
    }
}
