//! Queries a node's daemon like generic gRPC clients do: `grpc_client SOCKET`.
//!
//! Lists the services by reflection, fetches the descriptor of `xlaunch.v1.Node` in the same way, checks that all
//! services are healthy, and calls `Status`. Prints one line for each; ends with an error at the first unexpected
//! reply.

#![expect(clippy::print_stdout, reason = "prints the result")]

use std::error::Error;
use std::path::PathBuf;

use tonic::transport::Channel;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;
use tonic_reflection::pb::v1::ServerReflectionRequest;
use tonic_reflection::pb::v1::server_reflection_client::ServerReflectionClient;
use tonic_reflection::pb::v1::server_reflection_request::MessageRequest;
use tonic_reflection::pb::v1::server_reflection_response::MessageResponse;
use xlaunch_proto::connect::{connect, endpoint};
use xlaunch_proto::v1::NodeStatusRequest;
use xlaunch_proto::v1::node_client::NodeClient;

const NODE: &str = "xlaunch.v1.Node";

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    let socket = PathBuf::from(std::env::args_os().nth(1).ok_or("usage: grpc_client SOCKET")?);
    let channel = connect(&socket, endpoint()).await?;

    let reply = reflect(&channel, MessageRequest::ListServices(String::new())).await?;
    let MessageResponse::ListServicesResponse(list) = reply else {
        return Err("reflection returned no list of services".into());
    };
    let mut services: Vec<_> = list.service.into_iter().map(|service| service.name).collect();
    services.sort();
    println!("services: {}", services.join(" "));

    let reply = reflect(&channel, MessageRequest::FileContainingSymbol(NODE.into())).await?;
    let MessageResponse::FileDescriptorResponse(files) = reply else {
        return Err(format!("reflection returned no descriptor of {NODE}").into());
    };
    let files = files.file_descriptor_proto;
    let describes =
        |name: &str| files.iter().any(|file| file.windows(name.len()).any(|bytes| bytes == name.as_bytes()));
    for name in ["xlaunch/v1/node.proto", "xlaunch.v1", "Node", "Status", "NodeStatusRequest"] {
        if !describes(name) {
            return Err(format!("the descriptor of {NODE} lacks {name}").into());
        }
    }
    println!("descriptor: {NODE}");

    for service in ["", NODE] {
        let request = HealthCheckRequest { service: service.into() };
        let health = HealthClient::new(channel.clone()).check(request).await?.into_inner();
        if health.status() != ServingStatus::Serving {
            return Err(format!("health of {service:?}: {:?}", health.status()).into());
        }
    }
    println!("health: SERVING");

    let status = NodeClient::new(channel).status(NodeStatusRequest {}).await?.into_inner();
    println!("daemon: {} {}", status.daemon_pid, status.version);
    Ok(())
}

async fn reflect(channel: &Channel, request: MessageRequest) -> Result<MessageResponse, Box<dyn Error>> {
    let request = ServerReflectionRequest { host: String::new(), message_request: Some(request) };
    let mut reflection = ServerReflectionClient::new(channel.clone());
    let replies = reflection.server_reflection_info(tokio_stream::once(request)).await;
    let reply = replies?.into_inner().message().await?.ok_or("reflection ended without a reply")?;
    reply.message_response.ok_or_else(|| "reflection returned an empty reply".into())
}
