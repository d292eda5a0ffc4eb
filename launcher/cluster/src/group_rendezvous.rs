//! The rendezvous of the nodes of one attempt. Its inputs are the values on which the ranks of each node agree, as
//! found by the node's agent. Pure: the coordinator feeds it.
//!
//! Nodes join in any order. Each gets a reply of its own, whose size does not depend on the number of nodes: of the
//! other nodes it names only the address of the next one's first rank, to which this node's last rank connects its
//! ring.

use xlaunch_proto::v1;
use xlaunch_spec::ids::{Digest, NcclId, RingKey};

/// A node whose ranks have joined and agree with each other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeJoin {
    /// Digest of the job description.
    pub config_hash: Digest,
    /// Digest of parameter offsets, buckets and training data.
    pub layout_hash: Digest,
    /// NCCL id from rank 0, if that rank is on this node and uses a GPU.
    pub nccl_id: Option<NcclId>,
    /// Address at which the node's first rank listens for the preceding rank; empty with NCCL.
    pub ring_address: String,
    /// The node's ranks compute on GPUs.
    pub has_gpus: bool,
}

/// The information that a node's ranks need to connect to the others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupJoin {
    /// NCCL id from rank 0.
    pub nccl_id: Option<NcclId>,
    /// Address at which the next node's first rank listens; empty with NCCL. In a single-node job, that of its own
    /// first rank.
    pub next_ring_address: String,
    /// Key of this attempt's ring.
    pub ring_key: RingKey,
}

/// State of the rendezvous after a node has joined.
#[derive(Debug, PartialEq, Eq)]
pub enum GroupProgress {
    /// Other nodes are missing.
    Waiting,
    /// All nodes have joined. Holds the reply for each, by node rank.
    Complete(Vec<GroupJoin>),
    /// The node does not belong to this rendezvous, which continues without it. Holds the reason.
    Ignored(String),
    /// The nodes disagree, so the rendezvous fails on all of them. Holds the reason.
    Failed(String),
}

impl NodeJoin {
    /// Converts to the wire format.
    pub fn to_wire(&self, attempt: u32) -> v1::NodeJoin {
        v1::NodeJoin {
            attempt,
            config_hash: self.config_hash.0.to_vec(),
            layout_hash: self.layout_hash.0.to_vec(),
            nccl_id: self.nccl_id.map(|id| id.0.to_vec()).unwrap_or_default(),
            ring_address: self.ring_address.clone(),
            has_gpus: self.has_gpus,
        }
    }
}

impl TryFrom<v1::NodeJoin> for NodeJoin {
    type Error = String;

    fn try_from(join: v1::NodeJoin) -> Result<Self, String> {
        let digest =
            |bytes: Vec<u8>| bytes.try_into().map(Digest).map_err(|_| "a digest has the wrong length");
        Ok(Self {
            config_hash: digest(join.config_hash)?,
            layout_hash: digest(join.layout_hash)?,
            nccl_id: nccl_id(join.nccl_id)?,
            ring_address: join.ring_address,
            has_gpus: join.has_gpus,
        })
    }
}

impl GroupJoin {
    /// Converts to the wire format.
    pub fn to_wire(&self, attempt: u32) -> v1::GroupJoin {
        v1::GroupJoin {
            attempt,
            nccl_id: self.nccl_id.map(|id| id.0.to_vec()).unwrap_or_default(),
            next_ring_address: self.next_ring_address.clone(),
            ring_key: self.ring_key.0.to_vec(),
            problem: String::new(),
        }
    }
}

impl TryFrom<v1::GroupJoin> for GroupJoin {
    /// The reason why the rendezvous failed.
    type Error = String;

    fn try_from(join: v1::GroupJoin) -> Result<Self, String> {
        if !join.problem.is_empty() {
            return Err(join.problem);
        }
        Ok(Self {
            nccl_id: nccl_id(join.nccl_id)?,
            next_ring_address: join.next_ring_address,
            ring_key: join
                .ring_key
                .try_into()
                .map(RingKey)
                .map_err(|_| "the ring key has the wrong length")?,
        })
    }
}

fn nccl_id(bytes: Vec<u8>) -> Result<Option<NcclId>, String> {
    if bytes.is_empty() {
        return Ok(None);
    }
    bytes.try_into().map(|id| Some(NcclId(id))).map_err(|_| "the NCCL id has the wrong length".into())
}

/// The rendezvous of the nodes of one attempt.
#[derive(Debug)]
pub struct GroupRendezvous {
    world: u32,
    ring_key: RingKey,
    joined: Vec<Option<NodeJoin>>,
}

/// Returns the reply for the only node of a job with `world` ranks.
///
/// # Errors
/// The reason why its ranks cannot train together.
pub fn join_alone(world: u32, node: NodeJoin, ring_key: RingKey) -> Result<GroupJoin, String> {
    match GroupRendezvous::new(1, world, ring_key).join(0, node) {
        GroupProgress::Complete(mut replies) if replies.len() == 1 => Ok(replies.remove(0)),
        GroupProgress::Failed(problem) | GroupProgress::Ignored(problem) => Err(problem),
        GroupProgress::Waiting | GroupProgress::Complete(_) => {
            Err("the rendezvous of one node is not complete".into())
        }
    }
}

impl GroupRendezvous {
    /// Creates a rendezvous of `nodes` nodes with `world` ranks in total. `ring_key` is new for each attempt.
    pub fn new(nodes: u32, world: u32, ring_key: RingKey) -> Self {
        Self { world, ring_key, joined: (0..nodes).map(|_| None).collect() }
    }

    /// Adds a node.
    pub fn join(&mut self, node_rank: u32, node: NodeJoin) -> GroupProgress {
        let nodes = self.joined.len();
        match self.joined.get(node_rank as usize) {
            None => {
                return GroupProgress::Ignored(format!(
                    "node {node_rank} does not exist in a group of {nodes} nodes"
                ));
            }
            Some(Some(_)) => return GroupProgress::Ignored(format!("node {node_rank} has already joined")),
            Some(None) => {}
        }
        let disagreement = self.disagreement(node_rank, &node);
        if let Some(problem) = disagreement.or_else(|| self.unusable(node_rank, &node)) {
            return GroupProgress::Failed(problem);
        }
        self.joined[node_rank as usize] = Some(node);
        self.complete().map_or(GroupProgress::Waiting, GroupProgress::Complete)
    }

    /// Returns the ranks of nodes that have not joined.
    pub fn missing(&self) -> Vec<u32> {
        let missing = self.joined.iter().zip(0..).filter(|(node, _)| node.is_none());
        missing.map(|(_, node_rank)| node_rank).collect()
    }

    /// Describes how a node disagrees with the first one that joined.
    fn disagreement(&self, node_rank: u32, node: &NodeJoin) -> Option<String> {
        let (other_rank, other) =
            self.joined.iter().zip(0u32..).find_map(|(other, rank)| Some((rank, other.as_ref()?)))?;
        let both = |what: &str, own: &dyn std::fmt::Display, others: &dyn std::fmt::Display| {
            format!("node {node_rank} has {what} than node {other_rank}: `{own}` and `{others}`")
        };
        if node.config_hash != other.config_hash {
            return Some(both("a different configuration", &node.config_hash, &other.config_hash));
        }
        if node.layout_hash != other.layout_hash {
            let what = "a different bucket layout or different training data";
            return Some(both(what, &node.layout_hash, &other.layout_hash));
        }
        let device = |node: &NodeJoin| if node.has_gpus { "GPU" } else { "CPU" };
        (node.has_gpus != other.has_gpus).then(|| both("different devices", &device(node), &device(other)))
    }

    /// Describes why a node that agrees with the others still cannot connect to them.
    fn unusable(&self, node_rank: u32, node: &NodeJoin) -> Option<String> {
        if self.world > 1 && node.has_gpus && node_rank == 0 && node.nccl_id.is_none() {
            return Some("rank 0 sent no NCCL id for a job on GPUs".into());
        }
        let has_ring = !node.ring_address.is_empty();
        (self.joined.len() > 1 && !node.has_gpus && !has_ring)
            .then(|| format!("the first rank of node {node_rank} sent no ring address for a job on CPUs"))
    }

    /// Returns the replies once all nodes have joined.
    fn complete(&self) -> Option<Vec<GroupJoin>> {
        let all: Vec<&NodeJoin> = self.joined.iter().map(Option::as_ref).collect::<Option<_>>()?;
        let nccl_id = all.first().and_then(|node| node.nccl_id);
        let next = all.iter().cycle().skip(1);
        let reply = |next: &&NodeJoin| GroupJoin {
            nccl_id,
            next_ring_address: next.ring_address.clone(),
            ring_key: self.ring_key,
        };
        Some(next.take(all.len()).map(reply).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: RingKey = RingKey([9; 32]);

    fn node(ring_address: &str) -> NodeJoin {
        NodeJoin {
            config_hash: Digest::of(b"job"),
            layout_hash: Digest::of(b"layout"),
            nccl_id: None,
            ring_address: ring_address.into(),
            has_gpus: false,
        }
    }

    fn gpu_node(nccl_id: Option<NcclId>) -> NodeJoin {
        NodeJoin { nccl_id, has_gpus: true, ..node("") }
    }

    #[test]
    fn every_node_learns_the_address_of_the_next_one_alone() {
        let mut group = GroupRendezvous::new(3, 6, KEY);
        assert_eq!(group.join(2, node("tcp:c:1")), GroupProgress::Waiting);
        assert_eq!(group.missing(), [0, 1]);
        assert_eq!(group.join(0, node("tcp:a:1")), GroupProgress::Waiting);
        let GroupProgress::Complete(replies) = group.join(1, node("tcp:b:1")) else { panic!("not complete") };
        let next: Vec<&str> = replies.iter().map(|reply| reply.next_ring_address.as_str()).collect();
        assert_eq!(next, ["tcp:b:1", "tcp:c:1", "tcp:a:1"]);
        assert!(replies.iter().all(|reply| reply.ring_key == KEY && reply.nccl_id.is_none()));
        assert!(group.missing().is_empty());
    }

    #[test]
    fn nccl_id_of_rank_0_reaches_all_nodes() {
        let id = NcclId([7; 128]);
        let mut group = GroupRendezvous::new(2, 2, KEY);
        assert_eq!(group.join(1, gpu_node(None)), GroupProgress::Waiting);
        let GroupProgress::Complete(replies) = group.join(0, gpu_node(Some(id))) else {
            panic!("not complete")
        };
        assert!(replies.iter().all(|reply| reply.nccl_id == Some(id) && reply.next_ring_address.is_empty()));
    }

    #[test]
    fn disagreement_names_the_node_and_both_values() {
        let failed = |other: NodeJoin| {
            let mut group = GroupRendezvous::new(3, 3, KEY);
            group.join(1, node("tcp:b:1"));
            match group.join(2, other) {
                GroupProgress::Failed(reason) => reason,
                other => panic!("{other:?}"),
            }
        };
        let other = Digest::of(b"other");
        for (node, words) in [
            (NodeJoin { config_hash: other, ..node("tcp:c:1") }, "a different configuration"),
            (NodeJoin { layout_hash: other, ..node("tcp:c:1") }, "different training data"),
        ] {
            let (reason, own) = (failed(node), other.to_string());
            assert!(reason.contains("node 2") && reason.contains("than node 1"), "{reason}");
            let others = [Digest::of(b"job"), Digest::of(b"layout")].map(|digest| digest.to_string());
            assert!(reason.contains(words) && reason.contains(&own), "{reason}");
            assert!(others.iter().any(|other| reason.contains(other)), "{reason}");
        }
        let reason = failed(gpu_node(None));
        assert!(reason.contains("`GPU` and `CPU`"), "{reason}");
        let reason = failed(node(""));
        assert!(reason.contains("node 2") && reason.contains("ring address"), "{reason}");
    }

    #[test]
    fn unknown_and_repeated_nodes_are_refused_without_failing_the_others() {
        let mut group = GroupRendezvous::new(2, 2, KEY);
        group.join(0, node("tcp:a:1"));
        for node_rank in [0, 2] {
            assert!(matches!(group.join(node_rank, node("tcp:x:1")), GroupProgress::Ignored(_)));
        }
        assert!(matches!(group.join(1, node("tcp:b:1")), GroupProgress::Complete(_)));
    }

    #[test]
    fn gpu_ranks_need_an_nccl_id_unless_there_is_one_rank() {
        let id = NcclId([7; 128]);
        assert_eq!(join_alone(2, gpu_node(Some(id)), KEY).unwrap().nccl_id, Some(id));
        assert_eq!(join_alone(1, gpu_node(None), KEY).unwrap().nccl_id, None);
        assert!(join_alone(2, gpu_node(None), KEY).unwrap_err().contains("NCCL id"));
        assert_eq!(join_alone(2, node("unix:/r0"), KEY).unwrap().next_ring_address, "unix:/r0");
    }
}
