//! `xlaunch top`: the node, its GPUs and its jobs on a whole terminal.
//!
//! ```text
//! daemon --feed (a task, every second)--> news --.
//! terminal --keys (a thread)----------------------+--> State (pure) --draw (pure)--> terminal
//! signals --> end
//! ```
//! The terminal is given back however this ends: [`Screen`] does it, and a panic's hook before its message.

mod draw;
mod feed;
mod state;

use std::io::IsTerminal;
use std::task::Poll;
use std::time::Duration;

use clap::Args;
use ratatui::DefaultTerminal;
use ratatui::crossterm::event::{self, Event};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;
use xlaunch_proto::exit::ExitCode;

use super::connect::{At, Daemon};
use crate::cli::console::End;
use feed::Feed;
use state::{Act, State};
use xlaunch_agent::Refusal;
use xlaunch_agent::clock::unix_ms;

/// How often the thread of keys looks whether anybody still wants them.
const LOOK: Duration = Duration::from_millis(200);

/// Options of `xlaunch top`.
#[derive(Debug, Args)]
pub(in crate::cli) struct Top {
    #[command(flatten)]
    at: At,
}

pub(super) async fn top(options: Top) -> Result<ExitCode, End> {
    if !std::io::stdout().is_terminal() || !std::io::stdin().is_terminal() {
        let message =
            "xlaunch top needs a terminal; `xlaunch jobs` and `xlaunch node` print the same, also as JSON";
        return Err(Refusal::new(ExitCode::Usage, message).into());
    }
    let mut daemon = Daemon::connect(&options.at).await?;
    // The first answer is waited for: its errors are better read without a screen around them.
    let mut state = State::new(has_colours(std::env::var_os("NO_COLOR").as_deref()));
    state.take(feed::ask(&mut daemon, None).await?);
    let failed = |error: std::io::Error| {
        End::from(Refusal::new(ExitCode::Internal, format!("failed to use the terminal: {error}")))
    };
    let mut signals = Signals::new().map_err(failed)?;
    let mut screen = Screen::open().map_err(failed)?;
    let mut events = events().map_err(failed)?;
    let mut feed = Feed::start(daemon, state.selected());
    loop {
        state.now(unix_ms());
        screen.terminal.draw(|frame| draw::draw(frame, &state)).map_err(failed)?;
        let act = tokio::select! {
            event = events.recv() => match event {
                Some(Event::Key(key)) => state.key(key),
                // Another size, which the next frame has.
                Some(_) => Act::Nothing,
                None => Act::Quit,
            },
            news = feed.next() => {
                state.take(news);
                Act::Nothing
            }
            exit = signals.next() => return Ok(exit),
        };
        match act {
            Act::Quit => return Ok(ExitCode::Done),
            Act::Cancel(job) => feed.cancel(job),
            Act::Nothing => {}
        }
        feed.select(state.selected());
    }
}

/// As <https://no-color.org> has it.
fn has_colours(no_color: Option<&std::ffi::OsStr>) -> bool {
    no_color.is_none_or(std::ffi::OsStr::is_empty)
}

/// The terminal in raw mode, until it is dropped.
struct Screen {
    terminal: DefaultTerminal,
}

impl Screen {
    fn open() -> std::io::Result<Self> {
        Ok(Self { terminal: ratatui::try_init()? })
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        // A terminal that is gone needs nothing back.
        let _ = self.terminal.show_cursor();
        let _ = ratatui::try_restore();
    }
}

/// What happens on the terminal. Its thread ends soon after nobody listens any more.
fn events() -> std::io::Result<mpsc::Receiver<Event>> {
    let (sender, events) = mpsc::channel(16);
    let read = move || {
        while !sender.is_closed() {
            match event::poll(LOOK) {
                Ok(false) => continue,
                Ok(true) => {}
                Err(_) => return,
            }
            match event::read().map(|event| sender.blocking_send(event)) {
                Ok(Ok(())) => {}
                _ => return,
            }
        }
    };
    std::thread::Builder::new().name("keys".into()).spawn(read)?;
    Ok(events)
}

/// Signals that end it, by number.
struct Signals(Vec<(u8, tokio::signal::unix::Signal)>);

impl Signals {
    fn new() -> std::io::Result<Self> {
        let kinds = [
            (1, SignalKind::hangup()),
            (2, SignalKind::interrupt()),
            (3, SignalKind::quit()),
            (15, SignalKind::terminate()),
        ];
        let signals = kinds.map(|(number, kind)| Ok((number, signal(kind)?)));
        signals.into_iter().collect::<std::io::Result<_>>().map(Self)
    }

    /// The exit code of the first that comes.
    async fn next(&mut self) -> ExitCode {
        std::future::poll_fn(|context| {
            let came = |(number, signal): &mut (u8, tokio::signal::unix::Signal)| {
                signal.poll_recv(context).is_ready().then_some(*number)
            };
            let number = self.0.iter_mut().find_map(came);
            number.map_or(Poll::Pending, |number| Poll::Ready(ExitCode::Signal(number)))
        })
        .await
    }
}
