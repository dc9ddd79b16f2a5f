//! One certificate authority and a certificate per component, as an installer would make them.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose,
};
use serde_json::json;

use crate::layout::{self, API_ADDRESS, API_URL};

/// The authority and the folder that its certificates go into.
#[derive(Debug)]
pub struct Pki {
    dir: PathBuf,
    issuer: Issuer<'static, KeyPair>,
}

/// Paths of a certificate and its key.
#[derive(Clone, Debug)]
pub struct Pair {
    /// PEM certificate.
    pub cert: PathBuf,
    /// PEM key.
    pub key: PathBuf,
}

impl Pki {
    /// Makes the authority and the key that signs service account tokens.
    pub fn create() -> Result<Self> {
        let dir = layout::run("pki");
        fs::create_dir_all(&dir).context("cannot make the folder for certificates")?;
        // Nothing is signed with it; without one, schedulers complain about its absence for as long as they run.
        let (_, proxies) = authority("mullion-lab-front-proxy")?;
        write(&dir.join("front-proxy-ca.crt"), &proxies)?;
        let (issuer, cert) = authority("mullion-lab")?;
        write(&dir.join("ca.crt"), &cert)?;
        let accounts = KeyPair::generate()?;
        write(&dir.join("sa.key"), &accounts.serialize_pem())?;
        write(&dir.join("sa.pub"), &accounts.public_key_pem())?;
        Ok(Self { dir, issuer })
    }

    /// A file in the folder of certificates.
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// A certificate for serving under `names`.
    pub fn server(&self, file: &str, names: &[&str]) -> Result<Pair> {
        let names = names.iter().map(|&name| name.to_owned()).collect::<Vec<_>>();
        let mut params = CertificateParams::new(names)?;
        params.distinguished_name.push(DnType::CommonName, file);
        self.sign(file, params, ExtendedKeyUsagePurpose::ServerAuth)
    }

    /// A certificate that identifies a user, in `group` if that is not empty.
    pub fn client(&self, file: &str, user: &str, group: &str) -> Result<Pair> {
        let mut params = CertificateParams::new(Vec::new())?;
        params.distinguished_name.push(DnType::CommonName, user);
        if !group.is_empty() {
            params.distinguished_name.push(DnType::OrganizationName, group);
        }
        self.sign(file, params, ExtendedKeyUsagePurpose::ClientAuth)
    }

    fn sign(
        &self,
        file: &str,
        mut params: CertificateParams,
        usage: ExtendedKeyUsagePurpose,
    ) -> Result<Pair> {
        params.extended_key_usages = vec![usage];
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        let key = KeyPair::generate()?;
        let cert = params.signed_by(&key, &self.issuer)?;
        let pair = Pair { cert: self.path(&format!("{file}.crt")), key: self.path(&format!("{file}.key")) };
        write(&pair.cert, &cert.pem())?;
        write(&pair.key, &key.serialize_pem())?;
        Ok(pair)
    }

    /// A client certificate and the kubeconfig that uses it, `<file>.kubeconfig` in the lab's folder.
    pub fn kubeconfig(&self, file: &str, user: &str, group: &str) -> Result<PathBuf> {
        let pair = self.client(file, user, group)?;
        let path = layout::run(&format!("{file}.kubeconfig"));
        write_kubeconfig(&path, user, &json!({"client-certificate": pair.cert, "client-key": pair.key}))?;
        Ok(path)
    }

    /// The API server's certificate.
    pub fn apiserver(&self) -> Result<Pair> {
        let names = [
            API_ADDRESS,
            "127.0.0.1",
            "10.96.0.1",
            "localhost",
            "kubernetes",
            "kubernetes.default",
            "kubernetes.default.svc",
        ];
        self.server("apiserver", &names)
    }
}

/// A new certificate authority and its certificate in PEM.
fn authority(name: &str) -> Result<(Issuer<'static, KeyPair>, String)> {
    let mut params = CertificateParams::new(Vec::new())?;
    params.distinguished_name.push(DnType::CommonName, name);
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    let key = KeyPair::generate()?;
    let cert = params.self_signed(&key)?.pem();
    Ok((Issuer::new(params, key), cert))
}

/// Writes a kubeconfig for the lab's API server with the given credentials.
pub fn write_kubeconfig(path: &Path, user: &str, credentials: &serde_json::Value) -> Result<()> {
    let config = json!({
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "lab", "cluster": {"server": API_URL, "certificate-authority": layout::run("pki/ca.crt")}}],
        "users": [{"name": user, "user": credentials}],
        "contexts": [{"name": "lab", "context": {"cluster": "lab", "user": user}}],
        "current-context": "lab",
    });
    write(path, &serde_json::to_string_pretty(&config)?)
}

/// Writes a file that its readers never see half written.
pub fn write(path: &Path, text: &str) -> Result<()> {
    let temporary = path.with_extension("tmp");
    fs::write(&temporary, text).with_context(|| format!("cannot write {}", temporary.display()))?;
    fs::rename(&temporary, path).with_context(|| format!("cannot write {}", path.display()))
}
