//! LSF and PBS: a list of hosts with one entry per slot. This host's rank is the position of its own name, and several
//! entries for a host make up one node.

use std::path::Path;

use xlaunch_spec::command::MAX_NODES;

use super::{Allocation, Host, MAX_HOSTS_BYTES, Sourced, ports};

pub(super) fn lsf(host: &Host<'_>) -> Result<Option<Allocation>, String> {
    let Some(job) = host.text("LSB_JOBID")? else { return Ok(None) };
    let file = host.text("LSB_DJOB_HOSTFILE")?.map(|file| read(host, "LSB_DJOB_HOSTFILE", &file));
    let listed = match (file, host.text("LSB_MCPU_HOSTS")?) {
        (Some(Ok(list)), _) => Listed { list, every: 1, variable: "LSB_DJOB_HOSTFILE" },
        // Alternating names and numbers of slots. A container may have the variables, but not the file.
        (_, Some(list)) => Listed { list, every: 2, variable: "LSB_MCPU_HOSTS" },
        (Some(Err(problem)), None) => return Err(problem),
        (None, None) => return Ok(None),
    };
    let variables = host.variables(&["LSB_JOBID", "LSB_DJOB_HOSTFILE", "LSB_MCPU_HOSTS"]);
    allocation(host, "LSF", format!("lsf-{job}"), "LSB_JOBID", &listed, variables, None).map(Some)
}

pub(super) fn pbs(host: &Host<'_>) -> Result<Option<Allocation>, String> {
    let Some(file) = host.text("PBS_NODEFILE")? else { return Ok(None) };
    let job = host.text("PBS_JOBID")?.ok_or("PBS: PBS_NODEFILE is set, but PBS_JOBID is not")?;
    let listed = Listed { list: read(host, "PBS_NODEFILE", &file)?, every: 1, variable: "PBS_NODEFILE" };
    let variables = host.variables(&["PBS_JOBID", "PBS_NODEFILE", "PBS_NODENUM"]);
    let number = host.number("PBS_NODENUM")?;
    allocation(host, "PBS", format!("pbs-{job}"), "PBS_JOBID", &listed, variables, number).map(Some)
}

fn read(host: &Host<'_>, variable: &str, file: &str) -> Result<String, String> {
    (host.read)(Path::new(file))
        .map_err(|problem| format!("{variable}: {problem}; --standalone uses this node alone"))
}

/// A list of hosts.
struct Listed {
    list: String,
    /// Number of words per entry; the first one is the host.
    every: usize,
    /// The variable that contains the list, or names its file.
    variable: &'static str,
}

/// Returns this node's place in the list. `number` is its rank if its name is not in the list.
fn allocation(
    host: &Host<'_>,
    engine: &'static str,
    run_id: String,
    job_variable: &str,
    listed: &Listed,
    variables: Vec<(&'static str, String)>,
    number: Option<Sourced<u32>>,
) -> Result<Allocation, String> {
    let variable = listed.variable;
    let hosts = distinct(listed)?;
    let first = hosts.first().ok_or_else(|| format!("{variable} lists no hosts"))?;
    let count = u32::try_from(hosts.len()).unwrap_or(u32::MAX);
    let is_own = |listed: &&str| hosts.len() == 1 || short(listed) == short(host.name);
    let own = hosts.iter().position(is_own).and_then(|at| u32::try_from(at).ok());
    let own = own.map(|value| Sourced { value, source: format!("place of {} in {variable}", host.name) });
    Ok(Allocation {
        engine,
        variables,
        nodes: Some(Sourced { value: count, source: format!("{variable} with {count} hosts") }),
        node_rank: own.or(number.filter(|rank| rank.value < count)),
        endpoint: Some(Sourced {
            value: ((*first).to_owned(), ports(&run_id)),
            source: format!("{variable}, {job_variable}"),
        }),
        run_id: Some(Sourced { value: run_id, source: job_variable.to_owned() }),
        munge: false,
    })
}

/// Returns the hosts without repetitions, in order.
fn distinct(listed: &Listed) -> Result<Vec<&str>, String> {
    let Listed { list, every, variable } = listed;
    if list.len() > MAX_HOSTS_BYTES {
        return Err(format!("{variable} is longer than {MAX_HOSTS_BYTES} bytes"));
    }
    let mut known = std::collections::HashSet::new();
    let hosts: Vec<&str> =
        list.split_whitespace().step_by(*every).filter(|host| known.insert(*host)).collect();
    if hosts.len() > MAX_NODES as usize {
        Err(format!("{variable} has more than {MAX_NODES} hosts"))
    } else {
        Ok(hosts)
    }
}

/// Returns a host's name without its domain. Addresses are not changed.
fn short(name: &str) -> &str {
    let is_address = name.parse::<std::net::IpAddr>().is_ok();
    if is_address { name } else { name.split('.').next().unwrap_or(name) }
}
