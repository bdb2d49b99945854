//! A stand-in for an API server and the kubelet behind it: it has some objects, and forwards ports as they
//! do.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use futures_util::{SinkExt, StreamExt};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::handshake::server::{Request, Response};

const PROTOCOL: &str = "sec-websocket-protocol";
/// The most of a request that is looked at.
const HEAD_MAX_BYTES: usize = 16 << 10;

/// Objects by path, without the query.
type Objects = Arc<Mutex<BTreeMap<String, Value>>>;

#[derive(Clone)]
pub struct StandIn {
    pub address: SocketAddr,
    objects: Objects,
    /// The pods that a port was forwarded of.
    pub forwarded: Arc<Mutex<Vec<String>>>,
}

impl StandIn {
    /// Starts a stand-in that forwards the port of every pod to `target`.
    pub async fn start(target: SocketAddr) -> StandIn {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let stand_in = StandIn { address, objects: Objects::default(), forwarded: Arc::default() };
        let serving = stand_in.clone();
        tokio::spawn(async move {
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                tokio::spawn(serving.clone().serve(stream, target));
            }
        });
        stand_in
    }

    pub fn put(&self, path: &str, object: Value) {
        self.objects.lock().unwrap().insert(path.to_owned(), object);
    }

    pub fn kubeconfig(&self) -> String {
        format!(
            "apiVersion: v1\nkind: Config\ncurrent-context: test\n\
             clusters:\n- name: test\n  cluster:\n    server: http://{}\n\
             users:\n- name: test\n  user: {{}}\n\
             contexts:\n- name: test\n  context:\n    cluster: test\n    user: test\n",
            self.address
        )
    }

    async fn serve(self, mut stream: TcpStream, target: SocketAddr) {
        let mut head = vec![0; HEAD_MAX_BYTES];
        let length = stream.peek(&mut head).await.unwrap();
        let text = String::from_utf8_lossy(&head[..length]).into_owned();
        let uri = text.split_whitespace().nth(1).unwrap_or_default().to_owned();
        let (path, query) = uri.split_once('?').unwrap_or((&uri, ""));
        if let Some(pod) = path.strip_suffix("/portforward") {
            let pod = pod.rsplit('/').next().unwrap().to_owned();
            self.forwarded.lock().unwrap().push(pod);
            let port = query.split('&').find_map(|part| part.strip_prefix("ports=")).unwrap();
            return forward(stream, port.parse().unwrap(), target).await;
        }
        let _ = stream.read(&mut head).await.unwrap();
        let found = self.objects.lock().unwrap().get(path).cloned();
        let (status, body) = match found {
            Some(Value::String(text)) => ("200 OK", text),
            Some(object) => ("200 OK", object.to_string()),
            None => {
                let status = json!({ "kind": "Status", "apiVersion": "v1", "metadata": {},
                    "status": "Failure", "message": format!("{path} is not there"),
                    "reason": "NotFound", "code": 404 });
                ("404 Not Found", status.to_string())
            }
        };
        let answer = format!(
            "HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\
             connection: close\r\n\r\n{body}",
            body.len()
        );
        stream.write_all(answer.as_bytes()).await.unwrap();
    }
}

/// Forwards like a kubelet: each frame begins with its channel, and the first one of a channel names the
/// port.
async fn forward(stream: TcpStream, port: u16, target: SocketAddr) {
    #[allow(clippy::result_large_err, reason = "the library says so")]
    let accept = |request: &Request, mut response: Response| {
        let offered = request.headers()[PROTOCOL].to_str().unwrap().split(',').next().unwrap().trim();
        response.headers_mut().insert(PROTOCOL, offered.parse().unwrap());
        Ok(response)
    };
    let socket = tokio_tungstenite::accept_hdr_async(stream, accept).await.unwrap();
    let (mut to_client, mut from_client) = socket.split();
    for channel in [0, 1] {
        let [low, high] = port.to_le_bytes();
        to_client.send(Message::binary(vec![channel, low, high])).await.unwrap();
    }
    let (mut from_target, mut to_target) = TcpStream::connect(target).await.unwrap().into_split();
    let inward = async {
        while let Some(Ok(message)) = from_client.next().await {
            match message {
                Message::Binary(data) if data.first() == Some(&0) => {
                    to_target.write_all(&data[1..]).await.unwrap();
                }
                Message::Close(_) => return,
                _ => {}
            }
        }
    };
    let outward = async {
        let mut data = vec![0; 64 << 10];
        loop {
            let length = from_target.read(&mut data).await.unwrap_or(0);
            if length == 0 {
                return;
            }
            let framed = [&[0], &data[..length]].concat();
            if to_client.send(Message::binary(framed)).await.is_err() {
                return;
            }
        }
    };
    tokio::select! {
        () = inward => {}
        () = outward => {}
    }
}
