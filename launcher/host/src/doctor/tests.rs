//! Tests that readings lead to the right findings.

use super::*;

fn gpu(index: u32) -> GpuReadings {
    GpuReadings {
        name: GpuName { index, uuid: format!("GPU-{index}") },
        model: "H100".into(),
        bus: Some(format!("0000:{index}b:00")),
        uncorrected_errors: Some(0),
        nvlinks: Some(NvLinks { up: 18 }),
        pcie: Some(PcieLink { width: 16, most: 16 }),
        ..GpuReadings::default()
    }
}

fn node(gpus: Vec<GpuReadings>) -> NodeReadings {
    NodeReadings { problem: None, driver: Some("570.1".into()), cuda: Some("12.8".into()), gpus }
}

/// Level, GPU and message of all findings.
fn seen(findings: &[Finding]) -> Vec<(Level, Option<u32>, &str)> {
    findings.iter().map(|it| (it.level, it.gpu.as_ref().map(|gpu| gpu.index), it.message.as_str())).collect()
}

#[test]
fn healthy_gpus_are_ok() {
    let found = gpus(&node(vec![gpu(0), gpu(1)]));
    let expected = [
        (Level::Ok, None, "driver 570.1, CUDA 12.8"),
        (Level::Ok, Some(0), "H100"),
        (Level::Ok, Some(1), "H100"),
    ];
    assert_eq!(seen(&found), expected);
}

#[test]
fn missing_nvml_is_a_warning_and_a_node_without_gpus_is_ok() {
    let broken = NodeReadings { problem: Some("NVML did not answer".into()), ..NodeReadings::default() };
    assert_eq!(seen(&gpus(&broken)), [(Level::Warning, None, "GPUs are not checked: NVML did not answer")]);
    assert_eq!(seen(&gpus(&NodeReadings::default())), [(Level::Ok, None, "there is no GPU")]);
}

#[test]
fn faults_are_failures_and_slowdowns_are_warnings() {
    let one = |change: &dyn Fn(&mut GpuReadings)| {
        let mut sick = gpu(1);
        change(&mut sick);
        let found = gpus(&node(vec![gpu(0), sick]));
        let of_sick = found.iter().filter(|it| it.gpu.as_ref().is_some_and(|gpu| gpu.index == 1));
        let lines: Vec<(Level, String)> = of_sick.map(|it| (it.level, it.message.clone())).collect();
        assert_eq!(lines.len(), 1, "{lines:?}");
        lines[0].clone()
    };
    let text = |level, message: &str| (level, message.to_owned());
    for (found, expected) in [
        (
            one(&|gpu| gpu.lost = Some("GPU is lost".into())),
            text(Level::Failure, "the driver cannot read it: GPU is lost"),
        ),
        (
            one(&|gpu| gpu.uncorrected_errors = Some(2)),
            text(Level::Failure, "2 uncorrected ECC errors since the driver was loaded"),
        ),
        (
            one(&|gpu| gpu.nvlinks = Some(NvLinks { up: 17 })),
            text(Level::Failure, "17 NVLinks up, 18 on another GPU of this node"),
        ),
        (
            one(&|gpu| gpu.has_pending_pages = Some(true)),
            text(Level::Warning, "memory pages wait to be retired"),
        ),
        (
            one(&|gpu| gpu.slowdowns = vec!["heat", "power brake"]),
            text(Level::Warning, "clocks are lowered: heat, power brake"),
        ),
        (
            one(&|gpu| gpu.pcie = Some(PcieLink { width: 8, most: 16 })),
            text(Level::Warning, "PCIe link has 8 of 16 lanes"),
        ),
        (one(&|gpu| gpu.processes = vec![7, 9]), text(Level::Warning, "in use by processes 7, 9")),
        (one(&|gpu| gpu.uncorrected_errors = None), text(Level::Ok, "H100")),
        (one(&|gpu| gpu.nvlinks = None), text(Level::Ok, "H100")),
    ] {
        assert_eq!(found, expected);
    }
}

#[test]
fn recent_fault_in_the_kernel_log_fails_its_gpu() {
    let node = node(vec![gpu(0), gpu(1)]);
    let xid = |number, minutes: u64| Xid {
        bus: "0000:1b:00".into(),
        number,
        age: Duration::from_secs(60 * minutes),
    };
    let found = |xids: &[Xid]| {
        let found = xid_findings(&node, Some(xids));
        found
            .iter()
            .map(|it| (it.level, it.gpu.as_ref().map(|gpu| gpu.index), it.message.clone()))
            .collect::<Vec<_>>()
    };
    assert_eq!(found(&[]), []);
    let fallen = "the GPU has fallen off the bus";
    assert_eq!(
        found(&[xid(79, 200), xid(79, 59), xid(31, 1)]),
        [
            (Level::Warning, Some(1), "Xid 31 1 min ago: usually an error of the program".into()),
            (Level::Failure, Some(1), format!("Xid 79 59 min ago: {fallen}")),
        ]
    );
    assert_eq!(found(&[xid(79, 60)]), [(Level::Warning, Some(1), format!("Xid 79 60 min ago: {fallen}"))]);
    assert_eq!(found(&[Xid { bus: "0000:ff:00".into(), ..xid(79, 1) }]), [], "another device");
    assert_eq!(xid_findings(&node, None)[0].level, Level::Warning);
}

#[test]
fn faults_name_the_rank_that_would_use_the_gpu() {
    let mut sick = gpu(2);
    sick.uncorrected_errors = Some(1);
    let node = node(vec![gpu(0), gpu(1), sick]);
    let ranks =
        |visible, world| faults(&node, visible, world).into_iter().map(|(rank, _)| rank).collect::<Vec<_>>();
    assert_eq!((ranks(None, 3), ranks(None, 2)), (vec![2], vec![]));
    assert_eq!(
        (ranks(Some("2,0"), 2), ranks(Some("0,1"), 2), ranks(Some("GPU-2"), 1)),
        (vec![0], vec![], vec![0])
    );
    let message = "GPU 2 (GPU-2): 1 uncorrected ECC errors since the driver was loaded";
    assert_eq!(faults(&node, None, 3)[0].1, message);
    let broken = NodeReadings { problem: Some("NVML is missing".into()), ..NodeReadings::default() };
    assert_eq!(faults(&broken, None, 3), []);
}

#[test]
fn report_is_read_back_from_its_json() {
    let name = GpuName { index: 3, uuid: "GPU-x".into() };
    let failure = Finding::of_gpu(Level::Failure, &name, "ecc", "broken").with_help("replace it");
    let report =
        Report { healthy: false, findings: vec![Finding::of_node(Level::Ok, "driver", "1"), failure] };
    let text = serde_json::to_string(&report).unwrap();
    assert_eq!(serde_json::from_str::<Report>(&text).unwrap(), report);
    let json: serde_json::Value = serde_json::from_str(&text).unwrap();
    let finding = &json["findings"][1];
    assert_eq!((&finding["level"], &finding["gpu"]["uuid"]), (&"failure".into(), &"GPU-x".into()));
}

#[test]
fn hidden_gpus_are_left_out() {
    let seen = |visible| {
        let node = node(vec![gpu(0), gpu(1), gpu(2)]).visible(visible);
        node.gpus.iter().map(|gpu| gpu.name.index).collect::<Vec<_>>()
    };
    assert_eq!((seen(None), seen(Some("GPU-2,0")), seen(Some(""))), (vec![0, 1, 2], vec![0, 2], vec![]));
}
