use xlaunch_proto::v1::{Gpu, NodeJobState};

use std::borrow::Cow;

use super::*;

const ANN: Caller = Caller { uid: 1001, name: Cow::Borrowed(""), admin: false };
const BOB: Caller = Caller { uid: 1002, name: Cow::Borrowed(""), admin: false };
const ADMIN: Caller = Caller { uid: 1003, name: Cow::Borrowed(""), admin: true };

fn job_of(id: u64, uid: u32, state: NodeJobState) -> Arc<JobView> {
    let job = Job { id, uid, state: state.into(), ..Default::default() };
    Arc::new(JobView { job, history: vec![Default::default(); 3].into(), ..Default::default() })
}

fn view(jobs: impl IntoIterator<Item = Arc<JobView>>) -> NodeView {
    let gpu = |index, job| Gpu { index, job, ..Default::default() };
    NodeView {
        node: NodeStatus { gpus: vec![gpu(0, 1), gpu(1, 2), gpu(2, 0)], ..Default::default() },
        jobs: jobs.into_iter().map(|job| (job.job.id, job)).collect(),
        ..NodeView::default()
    }
}

fn ids(view: &NodeView, caller: &Caller, ended: bool, limit: u32) -> Vec<u64> {
    list(view, caller, &ListRequest { ended, limit, before: 0 }).jobs.into_iter().map(|job| job.id).collect()
}

#[test]
fn callers_see_own_jobs_and_admins_all() {
    use NodeJobState::{Done, Queued, Running};
    let view = view([
        job_of(1, ANN.uid, Running),
        job_of(2, BOB.uid, Running),
        job_of(3, ANN.uid, Done),
        job_of(4, ANN.uid, Queued),
    ]);
    assert_eq!(ids(&view, &ANN, false, 0), [4, 1]);
    assert_eq!(ids(&view, &ANN, true, 0), [4, 3, 1]);
    assert_eq!(ids(&view, &ANN, true, 2), [4, 3]);
    assert_eq!(ids(&view, &BOB, true, 0), [2]);
    assert_eq!(ids(&view, &ADMIN, true, 0), [4, 3, 2, 1]);
    let other = job(&view, &BOB, 1).unwrap_err();
    assert_eq!(other.message(), job(&view, &BOB, 99).unwrap_err().message().replace("99", "1"));
    assert!(job(&view, &ADMIN, 1).is_ok() && job(&view, &ANN, 1).is_ok());
    let holders = |caller| status(&view, caller).gpus.iter().map(|gpu| gpu.job).collect::<Vec<_>>();
    assert_eq!(
        (holders(&ANN), holders(&BOB), holders(&ADMIN)),
        (vec![1, 0, 0], vec![0, 2, 0], vec![1, 2, 0])
    );
}

#[test]
fn list_is_limited_by_size_and_count_and_continues_on_the_next_page() {
    let long = |id| {
        let mut job = JobView::clone(&job_of(id, ANN.uid, NodeJobState::Queued));
        job.job.command_line = "x".repeat(4096);
        Arc::new(job)
    };
    let all = view((1..=100).map(long));
    let reply = list(&all, &ANN, &ListRequest::default());
    assert!((50..100).contains(&reply.jobs.len()), "{}", reply.jobs.len());
    assert_eq!(reply.jobs[0].id, 100);
    let (mut listed, mut before, mut pages) = (Vec::new(), 0, 0);
    loop {
        let page = list(&all, &ANN, &ListRequest { before, ..ListRequest::default() });
        listed.extend(page.jobs.iter().map(|job| job.id));
        (before, pages) = (listed.last().copied().unwrap(), pages + 1);
        if !page.more {
            break;
        }
    }
    assert_eq!((listed, pages), ((1..=100).rev().collect(), 2));
    let short = view((1..=2000).map(|id| job_of(id, ANN.uid, NodeJobState::Queued)));
    assert_eq!(ids(&short, &ANN, false, 5000).len(), MAX_LISTED_JOBS);
    assert!(list(&short, &ANN, &ListRequest::default()).jobs.iter().all(|job| job.history.is_empty()));
}

/// A watched job, and the sender of views.
struct Case {
    shown: watch::Sender<Arc<NodeView>>,
    jobs: mpsc::Receiver<Result<Job, Status>>,
}

impl Case {
    fn new() -> Self {
        let first = view([job_of(1, ANN.uid, NodeJobState::Queued)]);
        let (shown, seen) = watch::channel(Arc::new(first));
        let (sender, jobs) = mpsc::channel(1);
        tokio::spawn(async move { watch(seen, ANN, 1, &sender).await });
        Self { shown, jobs }
    }

    fn show(&self, state: NodeJobState, reason: impl Into<String>) {
        let mut job = JobView::clone(&job_of(1, ANN.uid, state));
        job.job.reason = reason.into();
        self.shown.send_replace(Arc::new(view([Arc::new(job)])));
    }

    async fn next(&mut self) -> Option<Result<Job, Status>> {
        tokio::time::timeout(Duration::from_secs(60), self.jobs.recv()).await.expect("a reply")
    }
}

#[tokio::test]
async fn watch_sends_job_then_changes_until_end() {
    let mut case = Case::new();
    let first = case.next().await.unwrap().unwrap();
    assert_eq!((first.state(), first.history.len()), (NodeJobState::Queued, 3));
    // A change of another job is not sent.
    let same = case.shown.borrow().jobs[&1].clone();
    case.shown.send_replace(Arc::new(view([same, job_of(2, BOB.uid, NodeJobState::Queued)])));
    tokio::time::sleep(3 * WATCH_INTERVAL).await;
    assert!(case.jobs.is_empty());
    case.show(NodeJobState::Running, "");
    assert_eq!(case.next().await.unwrap().unwrap().state(), NodeJobState::Running);
    case.show(NodeJobState::Done, "");
    assert_eq!(case.next().await.unwrap().unwrap().state(), NodeJobState::Done);
    assert!(case.next().await.is_none());
}

#[tokio::test]
async fn slow_watcher_skips_changes_and_fast_one_is_throttled() {
    let mut case = Case::new();
    while case.jobs.is_empty() {
        tokio::task::yield_now().await;
    }
    for number in 0..1000 {
        case.show(NodeJobState::Running, number.to_string());
        tokio::task::yield_now().await;
    }
    assert_eq!(case.next().await.unwrap().unwrap().state(), NodeJobState::Queued, "this one waited");
    assert_eq!(case.next().await.unwrap().unwrap().reason, "999", "the newest");

    let mut case = Case::new();
    let start = std::time::Instant::now();
    let mut sent = Vec::new();
    for number in 0..300 {
        case.show(NodeJobState::Running, number.to_string());
        tokio::time::sleep(Duration::from_millis(2)).await;
        sent.extend(case.jobs.try_recv());
    }
    let most = start.elapsed().as_millis() / 250 + 1;
    assert!(sent.len() >= 2 && sent.len() as u128 <= most, "{} of at most {most}", sent.len());
}

#[tokio::test]
async fn watch_ends_with_error_when_job_or_daemon_is_gone() {
    let mut case = Case::new();
    case.next().await.unwrap().unwrap();
    case.shown.send_replace(Arc::default());
    assert_eq!(case.next().await.unwrap().unwrap_err().code(), tonic::Code::NotFound);
    assert!(case.next().await.is_none());

    let Case { shown, mut jobs } = Case::new();
    jobs.recv().await.unwrap().unwrap();
    drop(shown);
    assert_eq!(jobs.recv().await.unwrap().unwrap_err().code(), tonic::Code::Unavailable);
}

#[test]
fn reused_user_id_hides_earlier_jobs() {
    let job = Job { id: 1, uid: 1001, user: "anna".into(), ..Job::default() };
    let job = Arc::new(JobView { job, ..JobView::default() });
    let view = NodeView { jobs: [(1, job)].into(), ..NodeView::default() };
    let named = |name: &'static str| Caller { name: Cow::Borrowed(name), ..ANN };
    assert_eq!((ids(&view, &named("anna"), true, 0), ids(&view, &named("bob"), true, 0)), (vec![1], vec![]));
    assert!(super::job(&view, &named("bob"), 1).is_err());
    let history = |name| history(&named(name), HistoryRequest::default()).unwrap().owner;
    assert_eq!(history("bob"), Some((1001, "bob".into())));
}

#[test]
fn waiting_job_does_not_reveal_the_id_of_another_users_job() {
    let job = |id, uid, first: Option<u64>| {
        let reason = first.map(|first| format!("waits for job {first} to start first")).unwrap_or_default();
        let job = Job { id, uid, reason, ..Job::default() };
        (id, Arc::new(JobView { job, first, ..JobView::default() }))
    };
    let view = NodeView { jobs: [job(3, 1002, None), job(4, 1001, Some(3))].into(), ..NodeView::default() };
    let reason = |caller: &Caller| view.jobs[&4].to_message_for(caller, &view, false).reason;
    assert_eq!(reason(&ANN), "waits for a job of another user to start first");
    assert_eq!(reason(&ADMIN), "waits for job 3 to start first");
    let listed = list(&view, &ANN, &ListRequest::default()).jobs;
    assert!(!listed[0].reason.contains('3'), "{listed:?}");
}
