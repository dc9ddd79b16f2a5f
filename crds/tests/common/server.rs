//! etcd and an API server of the test's own, on loopback, with no other part of a cluster beside them: nothing
//! schedules, collects or reconciles what a case creates.

use std::fs;
use std::io::Write as _;
use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;
use tempfile::TempDir;

/// A running API server; both processes end with it.
pub struct Server {
    folder: TempDir,
    url: String,
    children: Vec<Child>,
}

impl Server {
    /// Starts both and waits until they answer. The programs come from PATH.
    pub fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name).to_string_lossy().into_owned();
        let key = rcgen::KeyPair::generate().unwrap();
        fs::write(path("sa.key"), key.serialize_pem()).unwrap();
        fs::write(path("sa.pub"), key.public_key_pem()).unwrap();
        fs::write(path("tokens"), "admin,admin,1,\"system:masters\"\n").unwrap();
        let [client, peer, secure] = [free_port(), free_port(), free_port()];
        let [client, peer] = [client, peer].map(|port| format!("http://127.0.0.1:{port}"));
        let mut server = Self { url: format!("https://127.0.0.1:{secure}"), children: Vec::new(), folder };
        server.spawn(
            "etcd",
            &[
                format!("--data-dir={}", path_in(&server.folder, "etcd")),
                "--unsafe-no-fsync".to_owned(),
                format!("--listen-client-urls={client}"),
                format!("--advertise-client-urls={client}"),
                format!("--listen-peer-urls={peer}"),
                format!("--initial-advertise-peer-urls={peer}"),
                format!("--initial-cluster=default={peer}"),
            ],
        );
        server.spawn(
            "kube-apiserver",
            &[
                format!("--etcd-servers={client}"),
                format!("--secure-port={secure}"),
                "--bind-address=127.0.0.1".to_owned(),
                format!("--cert-dir={}", path_in(&server.folder, "certificates")),
                format!("--token-auth-file={}", path_in(&server.folder, "tokens")),
                format!("--service-account-key-file={}", path_in(&server.folder, "sa.pub")),
                format!("--service-account-signing-key-file={}", path_in(&server.folder, "sa.key")),
                "--service-account-issuer=https://kubernetes.default.svc".to_owned(),
                "--authorization-mode=Node,RBAC".to_owned(),
                "--enable-admission-plugins=NodeRestriction".to_owned(),
                // It would wait for the controller manager's default account.
                "--disable-admission-plugins=ServiceAccount".to_owned(),
                "--endpoint-reconciler-type=none".to_owned(),
                "--service-cluster-ip-range=10.99.0.0/24".to_owned(),
            ],
        );
        let deadline = Instant::now() + Duration::from_mins(3);
        while let Err(error) = server.kubectl("admin", &["get", "--raw=/readyz"], None) {
            let log = |of| fs::read_to_string(path_in(&server.folder, of)).unwrap_or_default();
            let ended = server.children.iter_mut().any(|c| c.try_wait().is_ok_and(|status| status.is_some()));
            assert!(
                !ended && Instant::now() < deadline,
                "no API server; PATH=$(tests/lab/parts/build):$PATH has what it needs: {error}\n{}\n{}",
                log("etcd.log"),
                log("kube-apiserver.log")
            );
            std::thread::sleep(Duration::from_millis(200));
        }
        server
    }

    fn spawn(&mut self, program: &str, args: &[String]) {
        let log = fs::File::create(path_in(&self.folder, &format!("{program}.log"))).unwrap();
        // Dropping does not happen when the test is killed; the kernel then ends the programs.
        let child = Command::new("setpriv")
            .args(["--pdeathsig", "KILL", "--", program])
            .args(args)
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .spawn()
            .unwrap_or_else(|e| {
                panic!("{program} must be on PATH (tests/lab/parts/build prints its folder): {e}")
            });
        self.children.push(child);
    }

    /// Runs kubectl with a token; the error is what it wrote to stderr.
    pub fn kubectl(&self, token: &str, args: &[&str], input: Option<&[u8]>) -> Result<String, String> {
        let mut child = Command::new("kubectl")
            .arg("--kubeconfig=/dev/null")
            .arg(format!("--server={}", self.url))
            .arg("--insecure-skip-tls-verify")
            .arg(format!("--token={token}"))
            .arg(format!("--cache-dir={}", path_in(&self.folder, "cache")))
            .args(args)
            .stdin(if input.is_some() { Stdio::piped() } else { Stdio::null() })
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap_or_else(|e| panic!("kubectl must be on PATH: {e}"));
        if let (Some(mut stdin), Some(input)) = (child.stdin.take(), input) {
            stdin.write_all(input).unwrap();
        }
        let output = child.wait_with_output().unwrap();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        if output.status.success() { Ok(text(&output.stdout)) } else { Err(text(&output.stderr)) }
    }

    /// Applies an object as the administrator.
    pub fn apply(&self, object: &Value) {
        let text = object.to_string();
        self.kubectl("admin", &["apply", "-f", "-"], Some(text.as_bytes())).unwrap();
    }

    /// Applies a file of the repository as the administrator.
    pub fn apply_file(&self, file: &str) {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(file);
        self.kubectl("admin", &["apply", "-f", &path.to_string_lossy()], None).unwrap();
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // The API server first: without etcd it would take its time.
        for child in self.children.iter_mut().rev() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn path_in(folder: &TempDir, name: &str) -> String {
    folder.path().join(name).to_string_lossy().into_owned()
}

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}
