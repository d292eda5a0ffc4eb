//! Asks a node's daemon for what generic clients of gRPC ask: `reflect SOCKET`.
//!
//! Lists the services by reflection, fetches the description of `xlaunch.v1.Node` the same way, checks that all are healthy,
//! and calls `Status`. Prints a line of each; the first that does not answer as it should ends it with an error.

#![expect(clippy::print_stdout, reason = "what it prints is the answer")]

use std::error::Error;
use std::path::PathBuf;

use tonic::transport::{Channel, Endpoint, Uri};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;
use tonic_reflection::pb::v1::ServerReflectionRequest;
use tonic_reflection::pb::v1::server_reflection_client::ServerReflectionClient;
use tonic_reflection::pb::v1::server_reflection_request::MessageRequest;
use tonic_reflection::pb::v1::server_reflection_response::MessageResponse;
use xlaunch_proto::v1::NodeStatusRequest;
use xlaunch_proto::v1::node_client::NodeClient;

const NODE: &str = "xlaunch.v1.Node";

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    let socket = PathBuf::from(std::env::args_os().nth(1).ok_or("reflect SOCKET")?);
    let connector = tower::service_fn(move |_: Uri| {
        let socket = socket.clone();
        async move {
            let stream = tokio::net::UnixStream::connect(socket).await?;
            Ok::<_, std::io::Error>(hyper_util::rt::TokioIo::new(stream))
        }
    });
    let channel = Endpoint::from_static("http://node").connect_with_connector(connector).await?;

    let answer = reflect(&channel, MessageRequest::ListServices(String::new())).await?;
    let MessageResponse::ListServicesResponse(list) = answer else {
        return Err("no list of services".into());
    };
    let mut services: Vec<_> = list.service.into_iter().map(|service| service.name).collect();
    services.sort();
    println!("services: {}", services.join(" "));

    let answer = reflect(&channel, MessageRequest::FileContainingSymbol(NODE.into())).await?;
    let MessageResponse::FileDescriptorResponse(files) = answer else { return Err("no description".into()) };
    let files = files.file_descriptor_proto;
    let describes =
        |name: &str| files.iter().any(|file| file.windows(name.len()).any(|bytes| bytes == name.as_bytes()));
    for name in ["xlaunch/v1/node.proto", "xlaunch.v1", "Node", "Status", "NodeStatusRequest"] {
        if !describes(name) {
            return Err(format!("the description of {NODE} does not have {name}").into());
        }
    }
    println!("described: {NODE}");

    for service in ["", NODE] {
        let request = HealthCheckRequest { service: service.into() };
        let health = HealthClient::new(channel.clone()).check(request).await?.into_inner();
        if health.status() != ServingStatus::Serving {
            return Err(format!("{service:?} is {:?}", health.status()).into());
        }
    }
    println!("health: SERVING");

    let status = NodeClient::new(channel).status(NodeStatusRequest {}).await?.into_inner();
    println!("daemon: {} {}", status.daemon_pid, status.version);
    Ok(())
}

async fn reflect(channel: &Channel, question: MessageRequest) -> Result<MessageResponse, Box<dyn Error>> {
    let request = ServerReflectionRequest { host: String::new(), message_request: Some(question) };
    let mut reflection = ServerReflectionClient::new(channel.clone());
    let answers = reflection.server_reflection_info(tokio_stream::once(request)).await;
    let answer = answers?.into_inner().message().await?.ok_or("reflection does not answer")?;
    answer.message_response.ok_or_else(|| "an empty answer".into())
}
