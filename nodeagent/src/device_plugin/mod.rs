//! The kubelet's device plugin protocol: listen, register, offer slots, answer.
//!
//! [`register`] decides when to listen and register, [`slots`] what to offer, [`server`] answers the calls; this
//! file is the shell that watches the kubelet's folder and does what the state machine says.

pub mod register;
pub mod server;
pub mod slots;

use std::ffi::OsStr;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use inotify::{EventMask, Inotify, WatchMask};
use mullion_core::request::COUNT;
use parking_lot::Mutex;
use tokio::net::UnixListener;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::transport::{Endpoint, Server};
use tracing::{debug, info, warn};

use crate::error::Error;
use crate::kubelet::API_VERSION;
use crate::kubelet::deviceplugin::RegisterRequest;
use crate::kubelet::deviceplugin::device_plugin_server::DevicePluginServer;
use crate::kubelet::deviceplugin::registration_client::RegistrationClient;
use register::{Action, Incarnation, Input, Machine};
use server::Service;

/// Name of our socket in the kubelet's folder.
pub const SOCKET: &str = "mullion-gpu.sock";
/// Name of the kubelet's socket there.
pub const KUBELET_SOCKET: &str = "kubelet.sock";

/// Where to pick up what inotify missed.
const LOOK_AGAIN: Duration = Duration::from_secs(5);
/// Longest that the kubelet may take for `Register`.
const REGISTER_TIMEOUT: Duration = Duration::from_secs(5);

/// Identity of a socket file.
type Inode = (u64, u64);

fn inode(path: &Path) -> Option<Inode> {
    std::fs::symlink_metadata(path).ok().map(|m| (m.dev(), m.ino()))
}

/// Inode numbers are used again, times are not.
fn incarnation(path: &Path) -> Option<Incarnation> {
    let meta = std::fs::symlink_metadata(path).ok()?;
    let mut hasher = DefaultHasher::new();
    (meta.dev(), meta.ino(), meta.mtime(), meta.mtime_nsec()).hash(&mut hasher);
    Some(Incarnation(hasher.finish()))
}

/// Runs the plugin in the kubelet's folder `dir` until the future is dropped. `registered` tells whether the
/// kubelet watches our slots.
///
/// # Errors
/// None in practice: what fails is logged and tried again. [`Error::Watch`] when inotify itself is not to be had.
pub async fn run(dir: PathBuf, service: Service, registered: watch::Sender<bool>) -> Result<(), Error> {
    let (inputs, mut received) = mpsc::unbounded_channel();
    let bound = Arc::new(Mutex::new(None));
    let folder = watch_folder(&dir, &bound, &inputs);
    let streams = count_streams(&service, &inputs);
    let drive = async {
        let mut shell = Shell {
            dir: dir.clone(),
            service: service.clone(),
            bound: Arc::clone(&bound),
            server: None,
            told: false,
        };
        let mut machine = Machine::default();
        let mut input = Input::Elapsed;
        loop {
            let mut action = machine.on(input);
            registered
                .send_if_modified(|r| std::mem::replace(r, machine.registered()) != machine.registered());
            while let Some(todo) = action {
                let outcome = shell.act(todo).await;
                action = machine.on(outcome);
            }
            input = match machine.wait() {
                Some(wait) => {
                    tokio::time::timeout(wait, received.recv()).await.unwrap_or(Some(Input::Elapsed))
                }
                None => received.recv().await,
            }
            // The senders live as long as this loop.
            .unwrap_or(Input::Elapsed);
        }
    };
    tokio::select! {
        result = folder => result,
        () = streams => Ok(()),
        () = drive => Ok(()),
    }
}

struct Shell {
    dir: PathBuf,
    service: Service,
    bound: Arc<Mutex<Option<Inode>>>,
    server: Option<JoinHandle<()>>,
    /// A failure to register was logged since the last success.
    told: bool,
}

impl Drop for Shell {
    fn drop(&mut self) {
        if let Some(server) = &self.server {
            server.abort();
        }
    }
}

impl Shell {
    async fn act(&mut self, action: Action) -> Input {
        match action {
            Action::Serve => match self.serve() {
                Ok(()) => Input::Serving,
                Err(error) => {
                    warn!(code = error.code(), error = %mullion_telemetry::source_chain(&error), "cannot listen");
                    Input::ServeFailed
                }
            },
            Action::Register => match self.register().await {
                Ok(input) => {
                    self.told = false;
                    if matches!(input, Input::Registered(_)) {
                        info!(resource = COUNT, "registered with the kubelet");
                    }
                    input
                }
                Err(error) => {
                    // The socket of a kubelet that was killed stays; the first of many failures says it all.
                    if std::mem::replace(&mut self.told, true) {
                        debug!(code = error.code(), error = %mullion_telemetry::source_chain(&error), "not registered");
                    } else {
                        warn!(code = error.code(), error = %mullion_telemetry::source_chain(&error), "not registered");
                    }
                    Input::RegisterFailed
                }
            },
        }
    }

    /// Listens on a socket of a temporary name and moves it into place, so that a stale one of a former run is
    /// replaced without a moment in which there is none.
    fn serve(&mut self) -> Result<(), Error> {
        let path = self.dir.join(SOCKET);
        let fresh = self.dir.join(format!(".{SOCKET}.new"));
        match std::fs::remove_file(&fresh) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
                return Err(Error::file("remove", fresh)(e));
            }
            _ => {}
        }
        let listener = UnixListener::bind(&fresh)
            .map_err(|source| Error::Listen { address: fresh.display().to_string(), source })?;
        *self.bound.lock() = inode(&fresh);
        std::fs::rename(&fresh, &path).map_err(Error::file("move into place", &path))?;
        let server = Server::builder().add_service(DevicePluginServer::new(self.service.clone()));
        let task = tokio::spawn(async move {
            if let Err(error) = server.serve_with_incoming(UnixListenerStream::new(listener)).await {
                warn!(error = %mullion_telemetry::source_chain(&error), "the plugin's socket ended");
            }
        });
        // Connections of the old listener are tasks of their own and end with their peers.
        if let Some(old) = self.server.replace(task) {
            old.abort();
        }
        Ok(())
    }

    async fn register(&mut self) -> Result<Input, Error> {
        let open = *self.service.streams().borrow();
        if open > 0 {
            return Ok(Input::AlreadyOpen(open));
        }
        if inode(&self.dir.join(SOCKET)) != *self.bound.lock() {
            self.serve()?;
        }
        let socket = self.dir.join(KUBELET_SOCKET);
        let failed = |source: Box<dyn std::error::Error + Send + Sync>| Error::Register {
            socket: self.dir.join(KUBELET_SOCKET),
            source,
        };
        let before = incarnation(&socket);
        let channel = Endpoint::try_from(format!("unix://{}", socket.display()))
            .map_err(|e| failed(e.into()))?
            .connect_timeout(REGISTER_TIMEOUT)
            .timeout(REGISTER_TIMEOUT)
            .connect()
            .await
            .map_err(|e| failed(e.into()))?;
        let request = RegisterRequest {
            version: API_VERSION.to_owned(),
            endpoint: SOCKET.to_owned(),
            resource_name: COUNT.to_owned(),
            options: Some(server::options()),
        };
        // Which kubelet it is that answers must be certain.
        let Some(kubelet) = before.filter(|b| incarnation(&socket) == Some(*b)) else {
            return Err(failed("its socket was replaced meanwhile".into()));
        };
        RegistrationClient::new(channel).register(request).await.map_err(|e| failed(e.into()))?;
        Ok(Input::Registered(kubelet))
    }
}

async fn count_streams(service: &Service, inputs: &mpsc::UnboundedSender<Input>) {
    let mut streams = service.streams();
    loop {
        let open = *streams.borrow_and_update();
        if inputs.send(Input::Streams(open)).is_err() || streams.changed().await.is_err() {
            return;
        }
    }
}

/// Reports both sockets' coming and going; sets the watch up anew when the folder itself is replaced.
async fn watch_folder(
    dir: &Path,
    bound: &Mutex<Option<Inode>>,
    inputs: &mpsc::UnboundedSender<Input>,
) -> Result<(), Error> {
    loop {
        let watched = watch_once(dir, bound, inputs).await;
        if let Err(error) = watched {
            warn!(code = error.code(), error = %mullion_telemetry::source_chain(&error), "looking again");
        }
        let _ = inputs.send(Input::KubeletDown);
        let _ = inputs.send(Input::SocketGone);
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

async fn watch_once(
    dir: &Path,
    bound: &Mutex<Option<Inode>>,
    inputs: &mpsc::UnboundedSender<Input>,
) -> Result<(), Error> {
    std::fs::create_dir_all(dir).map_err(Error::file("create", dir))?;
    let failed = |source| Error::Watch { path: dir.to_owned(), source };
    let inotify = Inotify::init().map_err(failed)?;
    let mask = WatchMask::CREATE
        | WatchMask::MOVED_TO
        | WatchMask::DELETE
        | WatchMask::MOVED_FROM
        | WatchMask::DELETE_SELF
        | WatchMask::MOVE_SELF;
    inotify.watches().add(dir, mask).map_err(failed)?;
    let mut events = inotify.into_event_stream([0; 4096]).map_err(failed)?;
    let look = || {
        let kubelet = incarnation(&dir.join(KUBELET_SOCKET));
        let _ = inputs.send(kubelet.map_or(Input::KubeletDown, Input::KubeletUp));
    };
    let ours_gone = || {
        let bound = *bound.lock();
        if bound.is_some() && inode(&dir.join(SOCKET)) != bound {
            let _ = inputs.send(Input::SocketGone);
        }
    };
    look();
    loop {
        let Ok(next) = tokio::time::timeout(LOOK_AGAIN, events.next()).await else {
            ours_gone();
            continue;
        };
        let Some(event) = next.transpose().map_err(failed)? else { return Ok(()) };
        if event.mask.intersects(EventMask::DELETE_SELF | EventMask::MOVE_SELF | EventMask::IGNORED) {
            return Ok(());
        }
        if event.mask.contains(EventMask::Q_OVERFLOW) {
            look();
            ours_gone();
            continue;
        }
        let appeared = event.mask.intersects(EventMask::CREATE | EventMask::MOVED_TO);
        match event.name.as_deref().and_then(OsStr::to_str) {
            Some(KUBELET_SOCKET) => look(),
            Some(SOCKET) if !appeared => ours_gone(),
            _ => {}
        }
    }
}

/// Sockets of other plugins in the kubelet's folder that offer our resource, as far as a name tells: NVIDIA's and
/// HAMi's plugins name theirs after it.
#[must_use]
pub fn rivals(dir: &Path) -> Vec<String> {
    let names = std::fs::read_dir(dir).into_iter().flatten().flatten();
    let names = names.filter_map(|e| e.file_name().into_string().ok());
    let mut rivals: Vec<String> = names
        .filter(|n| n.starts_with("nvidia-gpu") && Path::new(n).extension() == Some(OsStr::new("sock")))
        .collect();
    rivals.sort_unstable();
    rivals
}
