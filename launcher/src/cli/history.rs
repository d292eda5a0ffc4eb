//! `xlaunch history`: jobs that have ended, from the daemon's accounting file.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use clap::Args;
use xlaunch_proto::v1::HistoryRequest;
use xlaunch_spec::exit::ExitCode;
use xlaunch_spec::quantities::parse_time;

use super::choice::whole;
use super::output::{QueryError, print, terminal_width};
use crate::client::daemon::{DaemonAddress, DaemonClient};
use crate::render::{history, text};
use xlaunch_spec::refusal::Refusal;

/// Options of `xlaunch history`.
#[derive(Debug, Args)]
pub(super) struct History {
    /// Only jobs of this user, by name or number
    #[arg(long, value_name = "USER")]
    user: Option<String>,
    /// Only jobs that ended within this time, such as 12h or 7d, or since this UTC date, such as 2026-11-01
    #[arg(long, value_name = "TIME")]
    since: Option<String>,
    /// Show only the N newest jobs
    #[arg(long, value_name = "N", value_parser = whole(1..=u32::MAX))]
    limit: Option<u32>,
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    daemon: DaemonAddress,
}

pub(super) async fn run(options: History) -> Result<ExitCode, QueryError> {
    let since = options.since.as_deref().map(|text| unix_ms(text, SystemTime::now())).transpose()?;
    let request = HistoryRequest {
        user: options.user.unwrap_or_default(),
        since_unix_ms: since.unwrap_or(0),
        ..HistoryRequest::default()
    };
    let jobs = DaemonClient::connect(&options.daemon).await?.history(request, options.limit).await?;
    let text = if options.json { text::json(&jobs) } else { history::table(&jobs, terminal_width()) };
    print(text.as_bytes())?;
    Ok(ExitCode::Done)
}

/// Parses a time before `now`, or a date with or without a time of day. Returns milliseconds since 1970.
fn unix_ms(text: &str, now: SystemTime) -> Result<u64, Refusal> {
    let date = humantime::parse_rfc3339_weak(text)
        .or_else(|_| humantime::parse_rfc3339_weak(&format!("{text} 00:00:00")));
    let since = match date {
        Ok(date) => date,
        Err(_) => {
            let expected = "expected a time such as 12h or 7d, or a UTC date such as 2026-11-01";
            let ago = parse_time(text)
                .map_err(|_| Refusal::new(ExitCode::Usage, format!("--since: `{text}`: {expected}")))?;
            now.checked_sub(ago).unwrap_or(UNIX_EPOCH)
        }
    };
    let since = since.duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO);
    Ok(u64::try_from(since.as_millis()).unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn history_starts_some_time_ago_or_at_a_date() {
        let now = UNIX_EPOCH + Duration::from_secs(1_000_000);
        let since = |text: &str| unix_ms(text, now).map_err(|refusal| refusal.message);
        assert_eq!(since("1h30m"), Ok((1_000_000 - 5400) * 1000));
        assert_eq!(since("9999d"), Ok(0));
        assert_eq!(since("1970-01-02"), Ok(86_400_000));
        assert_eq!(since("1970-01-02T00:00:01Z"), Ok(86_401_000));
        assert!(since("yesterday").unwrap_err().contains("--since: `yesterday`: expected a time"));
    }
}
