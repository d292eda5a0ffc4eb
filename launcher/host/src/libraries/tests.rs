//! Selection on simulated hosts: directories with empty files of libraries' names.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::os::unix::fs::symlink;
use std::path::Path;

use tempfile::TempDir;

use super::search::{Host, driver_cuda};
use super::{File, Kind, Libraries, Selected, links, select};

/// A host's file system.
struct Files {
    root: TempDir,
    variables: BTreeMap<String, OsString>,
}

impl Files {
    fn new() -> Self {
        Self { root: TempDir::new().unwrap(), variables: BTreeMap::new() }
    }

    fn path(&self, path: &str) -> std::path::PathBuf {
        self.root.path().join(path)
    }

    /// Creates an empty file.
    fn file(self, path: &str) -> Self {
        let file = self.path(path);
        fs_err::create_dir_all(file.parent().unwrap()).unwrap();
        fs_err::write(file, "").unwrap();
        self
    }

    /// Creates a library as distributions do: a file with the whole version, and a link with the interface's version.
    fn linked(self, dir: &str, name: &str, version: &str) -> Self {
        let full = format!("{dir}/{name}.{version}");
        let major = version.split('.').next().unwrap();
        let this = self.file(&full);
        symlink(this.path(&full), this.path(&format!("{dir}/{name}.{major}"))).unwrap();
        this
    }

    /// Creates a complete cuDNN as a Python package, in `site-packages` of an environment.
    fn cudnn_wheel(self, environment: &str, cuda: u64, version: &str) -> Self {
        let site = format!("{environment}/lib/python3.12/site-packages");
        self.file(&format!("{site}/nvidia/cudnn/lib/libcudnn.so.9"))
            .file(&format!("{site}/nvidia/cudnn/lib/libcudnn_graph.so.9"))
            .file(&format!("{site}/nvidia_cudnn_cu{cuda}-{version}.dist-info/METADATA"))
    }

    fn variable(mut self, name: &str, path: &str) -> Self {
        self.variables.insert(name.into(), self.path(path).into_os_string());
        self
    }

    fn select(&self, kind: Kind, driver: Option<u64>) -> Selected {
        let variable = |name: &str| self.variables.get(name).cloned();
        let all = select::all(&Host { root: self.root.path(), variable: &variable }, driver);
        all.into_iter().find(|selected| selected.kind == kind).unwrap()
    }
}

fn version(file: &File) -> String {
    file.version.as_ref().map_or_else(|| "?".into(), ToString::to_string)
}

fn chosen(selected: &Selected) -> Option<String> {
    selected.file.as_ref().map(version)
}

const SYSTEM: &str = "usr/lib64";

#[test]
fn newer_cudnn_of_the_active_environment_wins_over_an_older_one_in_the_loaders_path() {
    let host = Files::new()
        .linked(SYSTEM, "libcudnn.so", "9.14.0")
        .linked(SYSTEM, "libcudnn_graph.so", "9.14.0")
        .cudnn_wheel("venv", 13, "9.19.0.56")
        .variable("VIRTUAL_ENV", "venv");
    let selected = host.select(Kind::Cudnn, Some(13));
    assert_eq!(chosen(&selected).as_deref(), Some("9.19.0.56"));
    let [(other, reason)] = &selected.others[..] else { panic!("{selected:?}") };
    assert_eq!((version(other).as_str(), reason.as_str()), ("9.14.0", "not newer"));
    assert!(other.in_loader_path && !selected.file.unwrap().in_loader_path);
}

#[test]
fn environment_of_the_python_in_path_is_searched_without_running_it() {
    let host = Files::new().cudnn_wheel("conda", 13, "9.16.0.1").file("conda/bin/python3");
    let host = host.variable("PATH", "conda/bin");
    assert_eq!(chosen(&host.select(Kind::Cudnn, None)).as_deref(), Some("9.16.0.1"));
}

#[test]
fn job_that_must_not_choose_its_code_gets_no_libraries_of_its_user() {
    let host = Files::new()
        .cudnn_wheel("home/.local", 13, "9.19.0.56")
        .linked(SYSTEM, "libcudnn.so", "9.14.0")
        .file(&format!("{SYSTEM}/libcudnn_graph.so.9"))
        .variable("HOME", "home");
    assert_eq!(chosen(&host.select(Kind::Cudnn, None)).as_deref(), Some("9.14.0"));
    let host = host.variable("PATH", "bin");
    assert_eq!(chosen(&host.select(Kind::Cudnn, None)).as_deref(), Some("9.19.0.56"));
}

#[test]
fn libraries_that_need_a_newer_driver_or_another_cuda_are_passed_over_with_the_reason() {
    let host = Files::new()
        .linked("usr/local/cuda-13.0/lib64", "libnvrtc.so", "13.0.88")
        .linked("usr/local/cuda-12.8/lib64", "libnvrtc.so", "12.8.93")
        .cudnn_wheel("venv", 13, "9.19.0.56")
        .linked(SYSTEM, "libcudnn.so", "9.14.0")
        .file(&format!("{SYSTEM}/libcudnn_graph.so.9"))
        .variable("VIRTUAL_ENV", "venv");
    let nvrtc = host.select(Kind::Nvrtc, Some(12));
    assert_eq!(chosen(&nvrtc).as_deref(), Some("12.8.93"));
    assert_eq!(nvrtc.others[0].1, "it is for CUDA 13, and the driver supports CUDA 12");
    assert_eq!(chosen(&host.select(Kind::Nvrtc, Some(13))).as_deref(), Some("13.0.88"));
    assert_eq!(chosen(&host.select(Kind::Cudnn, Some(12))).as_deref(), Some("9.14.0"));

    let host = Files::new()
        .linked("usr/local/cuda/lib64", "libnvrtc.so", "13.0.88")
        .cudnn_wheel("venv", 12, "9.19.0.56")
        .variable("VIRTUAL_ENV", "venv");
    let cudnn = host.select(Kind::Cudnn, Some(13));
    assert_eq!(chosen(&cudnn), None);
    assert_eq!(cudnn.others[0].1, "it is for CUDA 12, and NVRTC is of CUDA 13");
}

#[test]
fn cudnn_without_its_other_files_is_passed_over() {
    let host = Files::new().linked(SYSTEM, "libcudnn.so", "9.19.0");
    let selected = host.select(Kind::Cudnn, None);
    assert_eq!(selected.file, None);
    assert_eq!(selected.others[0].1, "there is no libcudnn_graph.so.9 next to it");
}

#[test]
fn packages_for_two_releases_of_cuda_are_told_apart() {
    let site = "venv/lib/python3.12/site-packages";
    let host = Files::new()
        .file(&format!("{site}/nvidia/cublas/lib/libcublasLt.so.12"))
        .file(&format!("{site}/nvidia/cu13/lib/libcublasLt.so.13"))
        .file(&format!("{site}/nvidia_cublas_cu12-12.8.4.1.dist-info/METADATA"))
        .file(&format!("{site}/nvidia_cublas-13.0.2.14.dist-info/METADATA"))
        .variable("VIRTUAL_ENV", "venv");
    let selected = host.select(Kind::CublasLt, Some(13));
    assert_eq!(chosen(&selected).as_deref(), Some("13.0.2.14"));
    assert_eq!(version(&selected.others[0].0), "12.8.4.1");
    assert_eq!(chosen(&host.select(Kind::CublasLt, Some(12))).as_deref(), Some("12.8.4.1"));
}

#[test]
fn newest_of_two_nccls_is_selected_unless_a_variable_names_one() {
    let host = Files::new()
        .linked("opt/nccl", "libnccl.so", "2.27.7")
        .linked(SYSTEM, "libnccl.so", "2.28.3")
        .variable("LD_LIBRARY_PATH", "opt/nccl");
    assert_eq!(chosen(&host.select(Kind::Nccl, None)).as_deref(), Some("2.28.3"));
    let host = host.variable("XLAUNCH_NCCL", "opt/nccl/libnccl.so.2");
    let selected = host.select(Kind::Nccl, None);
    assert_eq!(chosen(&selected).as_deref(), Some("2.27.7"));
    assert_eq!(selected.others.len(), 1);
    assert_eq!(selected.others[0].1, "XLAUNCH_NCCL names another file");
}

#[test]
fn directories_of_the_loaders_configuration_are_searched() {
    let host = Files::new().linked("opt/vendor/lib", "libnccl.so", "2.28.9");
    fs_err::create_dir_all(host.path("etc/ld.so.conf.d")).unwrap();
    fs_err::write(host.path("etc/ld.so.conf"), "# comment\ninclude /etc/ld.so.conf.d/*.conf\n").unwrap();
    fs_err::write(host.path("etc/ld.so.conf.d/vendor.conf"), "/opt/vendor/lib\n").unwrap();
    let selected = host.select(Kind::Nccl, None);
    assert!(selected.file.is_some_and(|file| file.in_loader_path));
}

#[test]
fn major_version_of_cuda_is_known_from_the_driver() {
    let host = Files::new();
    fs_err::create_dir_all(host.path("proc/driver/nvidia")).unwrap();
    let read = |line: &str| {
        fs_err::write(host.path("proc/driver/nvidia/version"), line).unwrap();
        driver_cuda(host.root.path())
    };
    let line =
        |release| format!("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {release}  Release\n");
    assert_eq!(
        ["580.95.05", "570.133.20", "470.57.02"].map(|it| read(&line(it))),
        [Some(13), Some(12), Some(11)]
    );
    assert_eq!(read("nothing\n"), None);
    assert_eq!(driver_cuda(Path::new("/nowhere")), None);
}

#[test]
fn workers_find_the_selected_files_first_and_then_what_the_user_has_listed() {
    let host = Files::new()
        .linked("usr/local/cuda/lib64", "libnvrtc.so", "13.0.88")
        .cudnn_wheel("venv", 13, "9.19.0.56")
        .variable("VIRTUAL_ENV", "venv")
        .variable("LD_LIBRARY_PATH", "opt/mine")
        .variable("XLAUNCH_CACHE", "cache");
    let variable = |name: &str| host.variables.get(name).cloned();
    let selected = select::all(&Host { root: host.root.path(), variable: &variable }, Some(13));
    let made = links::create(&selected, &variable);
    assert_eq!(links::create(&selected, &variable), made, "launches share the directory");
    let library_path = variable("LD_LIBRARY_PATH").unwrap();
    let libraries = Libraries { selected, links: made.clone(), library_path };
    let variables: BTreeMap<_, _> = libraries.variables().into_iter().collect();
    let site = "venv/lib/python3.12/site-packages/nvidia/cudnn/lib";
    assert_eq!(variables["XLAUNCH_CUDNN"], host.path(&format!("{site}/libcudnn.so.9")));
    let dirs: Vec<_> = std::env::split_paths(&variables["LD_LIBRARY_PATH"]).collect();
    let made = made.unwrap();
    assert_eq!(
        dirs,
        [made.clone(), host.path("usr/local/cuda/lib64"), host.path(site), host.path("opt/mine")]
    );
    let link = fs_err::read_link(made.join("libnvrtc.so")).unwrap();
    assert_eq!(link, host.path("usr/local/cuda/lib64/libnvrtc.so.13"));
}
