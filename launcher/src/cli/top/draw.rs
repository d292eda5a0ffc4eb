//! Draws a frame. Pure.
//!
//! The screen shows, from top to bottom, the node, its GPUs, its jobs, the selected job and the keys. Text from other
//! users is escaped.

use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Paragraph, Sparkline};
use xlaunch_proto::v1::{Gpu, GpuState, Job, JobKind, NodeJobState};

use super::state::State;
use crate::render::text::{columns, escape, or_dash};
use crate::render::{job as job_text, jobs, launch, node};
use xlaunch_spec::quantities::count_text;

/// Maximum number of GPUs that are drawn one per line; more are drawn two per line.
const MAX_GPUS_IN_ONE_COLUMN: usize = 4;
/// Characters of a utilization bar.
const BAR_WIDTH: usize = 12;
/// Height of a curve in lines.
const CURVE_HEIGHT: u16 = 2;

pub(super) fn draw(frame: &mut Frame<'_>, state: &State) {
    let [node, gpus, jobs, job, keys] = layout(frame.area(), state);
    frame.render_widget(Paragraph::new(node_lines(state)), node);
    frame.render_widget(Paragraph::new(gpu_lines(state, gpus.width)), gpus);
    frame.render_widget(Paragraph::new(job_lines(state, jobs.height)), jobs);
    if let Some(selected) = state.job() {
        draw_job(frame, job, selected, state);
    }
    let style = Style::new().add_modifier(Modifier::REVERSED);
    frame.render_widget(Paragraph::new(escape(state.last_line().trim_end())).style(style), keys);
}

fn layout(area: Rect, state: &State) -> [Rect; 5] {
    let gpus = if state.is_zoomed() { 0 } else { lines(gpu_lines(state, area.width).len()) };
    let rest = area.height.saturating_sub(2 + gpus + 1);
    let wanted = state.job().map_or(0, |job| height(job, area.width));
    // The selected job leaves room for the table's head and some rows.
    let job = if state.is_zoomed() { rest } else { wanted.min(rest.saturating_sub(4).max(rest / 2)) };
    let heights = [2, gpus, rest - job, job, 1].map(Constraint::Length);
    Layout::vertical(heights).areas(area)
}

fn lines(count: usize) -> u16 {
    u16::try_from(count).unwrap_or(u16::MAX)
}

fn colour(state: &State, colour: Color) -> Style {
    if state.has_colours() { Style::new().fg(colour) } else { Style::new() }
}

fn node_lines(state: &State) -> Vec<Line<'static>> {
    let status = state.node();
    let mut counts = vec![Span::raw(node::counts(status))];
    if !status.drained.is_empty() {
        counts.push(Span::styled(
            format!("  drained: {}", escape(&status.drained)),
            colour(state, Color::Yellow),
        ));
    }
    let heading = node::heading(status, state.now_ms() / 1000);
    vec![Line::styled(heading, Style::new().add_modifier(Modifier::BOLD)), Line::from(counts)]
}

/// Returns the GPUs, one per line, or two if there are many.
fn gpu_lines(state: &State, width: u16) -> Vec<Line<'static>> {
    let node = state.node();
    if !node.gpu_problem.is_empty() {
        return vec![Line::raw(format!("GPUs unknown: {}", escape(&node.gpu_problem)))];
    }
    let per_line = if node.gpus.len() > MAX_GPUS_IN_ONE_COLUMN { 2 } else { 1 };
    let column = usize::from(width) / per_line;
    let rows = node.gpus.chunks(per_line).map(|row| {
        let cells = row.iter().flat_map(|gpu| gpu_cell(state, gpu, column, per_line == 1));
        Line::from(cells.collect::<Vec<_>>())
    });
    rows.collect()
}

/// Returns index, holder, utilization and memory of a GPU; power, temperature and name if there is room.
fn gpu_cell(state: &State, gpu: &Gpu, width: usize, has_room: bool) -> Vec<Span<'static>> {
    let holder = if gpu.job == 0 { gpu.state().label().to_owned() } else { format!("job {}", gpu.job) };
    let (bar, bar_colour) = match gpu.busy_percent {
        Some(busy) => (bar(busy), if busy < 10.0 { Color::Blue } else { Color::Green }),
        None => (format!("{:>BAR_WIDTH$}", "-"), Color::Reset),
    };
    let holder_colour = match gpu.state() {
        GpuState::Free => Color::Reset,
        GpuState::Held => Color::Green,
        _ => Color::Yellow,
    };
    let mut rest = format!("] {}", node::memory(gpu));
    if has_room {
        let power = or_dash(gpu.power_watts, |watts| format!("{watts:.0}W"));
        let temperature = or_dash(gpu.temperature_celsius, |degrees| format!("{degrees:.0}C"));
        rest =
            format!("{rest:<14} {power:>5} {temperature:>4}  {}  {}", escape(&gpu.name), escape(&gpu.reason));
    }
    let room = width.saturating_sub(3 + 9 + 1 + BAR_WIDTH);
    let rest: String = rest.trim_end().chars().take(room).collect();
    vec![
        Span::raw(format!("{:>2} ", gpu.index)),
        Span::styled(format!("{holder:<9}"), colour(state, holder_colour)),
        Span::raw("["),
        Span::styled(bar, colour(state, bar_colour)),
        Span::raw(format!("{rest:<room$}")),
    ]
}

/// Draws a utilization bar such as `||||     48%`.
fn bar(percent: f64) -> String {
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a number from 0 to 100")]
    let percent = percent.clamp(0.0, 100.0).round() as usize;
    let number = format!("{percent}%");
    let full = (percent * BAR_WIDTH).div_ceil(100).min(BAR_WIDTH - number.len());
    format!("{:<width$}{number}", "|".repeat(full), width = BAR_WIDTH - number.len())
}

/// Returns the rows of the table around the selected job.
fn job_lines(state: &State, height: u16) -> Vec<Line<'static>> {
    if state.is_zoomed() {
        return Vec::new();
    }
    if state.jobs().is_empty() {
        return vec![Line::raw(""), Line::raw("no jobs")];
    }
    let head = ["JOB", "NAME", "USER", "STATE", "GPUS", "TIME", "STEP OR REASON"];
    let rows: Vec<_> = state.jobs().iter().map(|job| row(job, state.now_ms())).collect();
    let table = columns(&head, &rows);
    let mut table = table.lines();
    let bold = Style::new().add_modifier(Modifier::BOLD);
    let title = Line::styled(format!("  {}", table.next().unwrap_or_default()), bold);
    // The empty line and the head take two.
    let room = usize::from(height).saturating_sub(2).max(1);
    let first = (state.cursor() + 1).saturating_sub(room);
    let shown = table.zip(state.jobs()).enumerate().skip(first).take(room).map(|(place, (row, job))| {
        if place == state.cursor() {
            return Line::styled(format!("> {row}"), Style::new().add_modifier(Modifier::REVERSED));
        }
        Line::styled(format!("  {row}"), colour(state, state_colour(job.state())))
    });
    [Line::raw(""), title].into_iter().chain(shown).collect()
}

fn row(job: &Job, now: u64) -> Vec<String> {
    let gpus = job.gpus.len().max(job.gpus_wanted as usize);
    vec![
        job.id.to_string(),
        jobs::truncated_name(&job.name),
        job_text::user(job),
        job.state().label().into(),
        gpus.to_string(),
        job_text::run_time(job, now),
        jobs::step_or_reason(job),
    ]
}

fn state_colour(state: NodeJobState) -> Color {
    match state {
        NodeJobState::Running => Color::Green,
        NodeJobState::Starting | NodeJobState::Stopping => Color::Yellow,
        NodeJobState::Failed | NodeJobState::Lost => Color::Red,
        _ => Color::Reset,
    }
}

/// Returns the number of lines needed to show a whole job.
fn height(job: &Job, width: u16) -> u16 {
    let curves = if job.history.is_empty() { 0 } else { 1 + CURVE_HEIGHT };
    lines(text(job, 0, width.into()).lines().count()).saturating_add(curves + 1)
}

/// Draws a title, the curves of a training job, and its text.
fn draw_job(frame: &mut Frame<'_>, area: Rect, job: &Job, state: &State) {
    let curve = if job.history.is_empty() { 0 } else { 1 + CURVE_HEIGHT };
    let [title, curves, rest] =
        Layout::vertical([Constraint::Length(1), Constraint::Length(curve), Constraint::Min(0)]).areas(area);
    let heading = format!("-- job {}  {}  {} ", job.id, job.name, job_text::state_and_reason(job));
    let heading = format!("{:-<width$}", escape(&heading), width = usize::from(title.width));
    frame.render_widget(
        Paragraph::new(Line::styled(heading, Style::new().add_modifier(Modifier::BOLD))),
        title,
    );
    if curve > 0 {
        let [left, _, right] =
            Layout::horizontal([Constraint::Fill(1), Constraint::Length(2), Constraint::Fill(1)])
                .areas(curves);
        let loss: Vec<_> = job.history.iter().map(|point| f64::from(point.loss)).collect();
        let speed: Vec<_> = job.history.iter().map(|point| point.tokens_per_second).collect();
        draw_curve(frame, left, "loss", &loss, |value| format!("{value:.4}"), colour(state, Color::Cyan));
        draw_curve(frame, right, "tok/s", &speed, count_text, colour(state, Color::Magenta));
    }
    let width = usize::from(rest.width);
    let text: Vec<_> =
        text(job, state.now_ms() / 1000, width).lines().map(|line| Line::raw(escape(line))).collect();
    frame.render_widget(Paragraph::new(text), rest);
}

/// Returns the command line, the failure report, progress, restarts and ranks.
fn text(job: &Job, now: u64, width: usize) -> String {
    let mut out = format!("{}\n", escape(&job.command_line));
    if !job.report.is_empty() {
        out += &format!("{}\n", job.report.trim_end());
    }
    if let Some(status) = &job.status {
        if job.kind() == JobKind::Trainer {
            out += &launch::training(status);
        }
        out += &launch::restarts(status, now);
        out += &launch::ranks(status, width);
    }
    out
}

/// Draws all values over the whole width.
fn draw_curve(
    frame: &mut Frame<'_>,
    area: Rect,
    name: &str,
    values: &[f64],
    show: impl Fn(f64) -> String,
    style: Style,
) {
    let [title, curve] =
        Layout::vertical([Constraint::Length(1), Constraint::Length(CURVE_HEIGHT)]).areas(area);
    let finite = || values.iter().copied().filter(|value| value.is_finite());
    let (least, most) =
        finite().fold((f64::MAX, f64::MIN), |(least, most), value| (least.min(value), most.max(value)));
    let last = values.last().map_or_else(String::new, |&value| show(value));
    let range = if least <= most { format!("  {} to {}", show(least), show(most)) } else { String::new() };
    frame.render_widget(Paragraph::new(format!("{name} {last}{range}")), title);
    let bars = bars(values, usize::from(curve.width), (least, most));
    frame.render_widget(Sparkline::default().data(bars).max(MAX_BAR_HEIGHT).style(style), curve);
}

/// Height of the highest bar, in eighths of a line.
const MAX_BAR_HEIGHT: u64 = 8 * CURVE_HEIGHT as u64;

/// Returns the height of each column's bar: the mean of its finite values, or `None` if there are none.
fn bars(values: &[f64], width: usize, (least, most): (f64, f64)) -> Vec<Option<u64>> {
    let width = width.min(values.len());
    let bar = |column: usize| {
        let part = &values[column * values.len() / width..(column + 1) * values.len() / width];
        let finite: Vec<_> = part.iter().copied().filter(|value| value.is_finite()).collect();
        if finite.is_empty() {
            return None;
        }
        #[expect(clippy::cast_precision_loss, reason = "a few values")]
        let mean = finite.iter().sum::<f64>() / finite.len() as f64;
        let share = if most > least { (mean - least) / (most - least) } else { 1.0 };
        #[expect(
            clippy::cast_precision_loss,
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a number from 1 to MAX_BAR_HEIGHT"
        )]
        let height = (1.0 + share.clamp(0.0, 1.0) * (MAX_BAR_HEIGHT - 1) as f64).round() as u64;
        Some(height)
    };
    (0..width).map(bar).collect()
}

#[cfg(test)]
mod tests;
