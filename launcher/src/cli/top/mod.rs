//! `xlaunch top`: the node, its GPUs and its jobs, full screen. Without a daemon, the user's launches on this host.
//!
//! ```text
//! daemon or agents --feed (a task, every second)--> updates --.
//! terminal --keys (a thread)-------------------------+--> State (pure) --draw (pure)--> terminal
//! signals --> exit
//! ```
//! The terminal is always restored: by dropping [`Screen`], and by a panic hook before the panic's message.

mod draw;
mod feed;
mod launches;
mod state;

use std::io::IsTerminal;
use std::task::Poll;
use std::time::Duration;

use clap::Args;
use ratatui::backend::{Backend, CrosstermBackend};
use ratatui::crossterm::event::{self, Event};
use ratatui::crossterm::execute;
use ratatui::crossterm::terminal::{self, EnterAlternateScreen};
use ratatui::layout::{Rect, Size};
use ratatui::{DefaultTerminal, TerminalOptions, Viewport};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;
use xlaunch_spec::exit::ExitCode;

use super::output::QueryError;
use crate::client::daemon::DaemonAddress;
use feed::{Feed, Source};
use state::{Command, State};
use xlaunch_host::clock::unix_ms;
use xlaunch_spec::refusal::Refusal;

/// Interval at which the key thread checks whether its channel is closed.
const KEY_POLL_INTERVAL: Duration = Duration::from_millis(200);

/// Options of `xlaunch top`.
#[derive(Debug, Args)]
pub(super) struct Top {
    #[command(flatten)]
    daemon: DaemonAddress,
}

pub(super) async fn run(options: Top) -> Result<ExitCode, QueryError> {
    if !std::io::stdout().is_terminal() || !std::io::stdin().is_terminal() {
        let message =
            "`xlaunch top` needs a terminal; use `xlaunch jobs` and `xlaunch node`, with --json in scripts";
        return Err(Refusal::new(ExitCode::Usage, message).into());
    }
    let mut source = Source::find(&options.daemon).await?;
    // The first snapshot is taken before the screen opens, so that its errors are printed normally.
    let mut state = State::new(has_colours(std::env::var_os("NO_COLOR").as_deref()));
    state.update(source.snapshot(None).await?);
    let failed = |error: std::io::Error| {
        QueryError::from(Refusal::new(ExitCode::Internal, format!("failed to use the terminal: {error}")))
    };
    let mut signals = Signals::new().map_err(failed)?;
    let mut screen = Screen::open().map_err(failed)?;
    let mut events = events().map_err(failed)?;
    let mut feed = Feed::start(source, state.selected());
    loop {
        state.set_time(unix_ms());
        screen.draw(&state).map_err(failed)?;
        let command = tokio::select! {
            event = events.recv() => match event {
                Some(Event::Key(key)) => state.key(key),
                // After a resize, the next frame has the new size.
                Some(_) => Command::Nothing,
                None => Command::Quit,
            },
            update = feed.next() => {
                state.update(update);
                Command::Nothing
            }
            exit = signals.next() => return Ok(exit),
        };
        match command {
            Command::Quit => return Ok(ExitCode::Done),
            Command::Cancel(job) => feed.cancel(job),
            Command::Nothing => {}
        }
        feed.select(state.selected());
    }
}

/// <https://no-color.org>: any value but the empty one turns colours off.
pub(super) fn has_colours(no_color: Option<&std::ffi::OsStr>) -> bool {
    no_color.is_none_or(std::ffi::OsStr::is_empty)
}

/// Size to draw for a terminal that does not know its own, such as a serial line or one of a container.
const DEFAULT_SIZE: Rect = Rect::new(0, 0, 80, 24);
/// Size to draw at most, because memory is allocated for each character. Some programs report 65535 x 65535.
const MAX_SIZE: Size = Size::new(2000, 1000);

/// The terminal in raw mode until this is dropped.
struct Screen {
    terminal: DefaultTerminal,
    area: Rect,
}

impl Screen {
    fn open() -> std::io::Result<Self> {
        let area = drawn_area()?;
        let screen = Self { terminal: ratatui::try_init_with_options(options(area))?, area };
        execute!(std::io::stdout(), EnterAlternateScreen)?;
        Ok(screen)
    }

    fn draw(&mut self, state: &State) -> std::io::Result<()> {
        let area = drawn_area()?;
        if area != self.area {
            let backend = CrosstermBackend::new(std::io::stdout());
            self.terminal = DefaultTerminal::with_options(backend, options(area))?;
            // `Terminal::clear` would ask for the position of the cursor, which not every terminal answers.
            self.terminal.backend_mut().clear()?;
            self.area = area;
        }
        self.terminal.draw(|frame| draw::draw(frame, state)).map(drop)
    }
}

/// Options for a fixed area: in full screen, memory is allocated for any size that the terminal reports.
fn options(area: Rect) -> TerminalOptions {
    TerminalOptions { viewport: Viewport::Fixed(area) }
}

fn drawn_area() -> std::io::Result<Rect> {
    let (columns, rows) = terminal::size()?;
    // A terminal may learn its size later.
    let is_known = columns > 0 && rows > 0;
    let area = Rect::new(0, 0, columns.min(MAX_SIZE.width), rows.min(MAX_SIZE.height));
    Ok(if is_known { area } else { DEFAULT_SIZE })
}

impl Drop for Screen {
    fn drop(&mut self) {
        // If the terminal is gone there is nothing to restore.
        let _ = self.terminal.show_cursor();
        let _ = ratatui::try_restore();
    }
}

/// Key presses and resizes. The thread that reads them ends once the receiver is dropped.
fn events() -> std::io::Result<mpsc::Receiver<Event>> {
    let (sender, events) = mpsc::channel(16);
    let read = move || {
        while !sender.is_closed() {
            match event::poll(KEY_POLL_INTERVAL) {
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

/// Signals that end the program, by number.
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

    /// Waits for a signal; returns the exit code for it.
    async fn next(&mut self) -> ExitCode {
        std::future::poll_fn(|context| {
            let received = |(number, signal): &mut (u8, tokio::signal::unix::Signal)| {
                signal.poll_recv(context).is_ready().then_some(*number)
            };
            let number = self.0.iter_mut().find_map(received);
            number.map_or(Poll::Pending, |number| Poll::Ready(ExitCode::Signal(number)))
        })
        .await
    }
}
