//! The webhook's certificate: made, trusted, renewed, so that at no moment a replica shows one that an API server
//! does not know yet.
//!
//! Every renewal has a CA of its own whose key is thrown away at once: there is nothing to steal that could sign
//! another. So a renewal takes steps, each of which can be repeated by whoever leads next: the new pair and both
//! CAs go into the Secret, both CAs go into the webhook configuration, then the new pair is shown, then the old CA
//! goes. [`plan`] says which step is next.

use std::collections::BTreeMap;
use std::time::Duration;

use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose,
};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use time::OffsetDateTime;
use x509_parser::extensions::GeneralName;
use x509_parser::parse_x509_certificate;

use crate::error::Error;

/// Clocks of API servers may lag behind ours by this much.
const BACKDATED: time::Duration = time::Duration::minutes(5);

/// Entries of the Secret.
const CA: &str = "ca.crt";
const CERTIFICATE: &str = "tls.crt";
const KEY: &str = "tls.key";
const NEXT_CERTIFICATE: &str = "next.crt";
const NEXT_KEY: &str = "next.key";

/// A certificate and its key, in PEM.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pair {
    /// The certificate.
    pub certificate: Vec<u8>,
    /// Its key.
    pub key: Vec<u8>,
}

/// What the Secret holds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Held {
    /// Every CA that is to be trusted now, newest first, in PEM.
    pub ca: Vec<u8>,
    /// What is shown.
    pub current: Pair,
    /// What will be shown once its CA is trusted.
    pub next: Option<Pair>,
}

impl Held {
    /// Reads a Secret; what is missing is empty.
    #[must_use]
    pub fn read(secret: &Secret) -> Self {
        let entry = |key: &str| {
            secret
                .data
                .as_ref()
                .and_then(|data| data.get(key))
                .map(|bytes| bytes.0.clone())
                .unwrap_or_default()
        };
        let next = Pair { certificate: entry(NEXT_CERTIFICATE), key: entry(NEXT_KEY) };
        Self {
            ca: entry(CA),
            current: Pair { certificate: entry(CERTIFICATE), key: entry(KEY) },
            next: (!next.certificate.is_empty()).then_some(next),
        }
    }

    /// The Secret's data.
    #[must_use]
    pub fn data(&self) -> BTreeMap<String, ByteString> {
        let mut data = BTreeMap::new();
        let mut put = |key: &str, value: &[u8]| data.insert(key.to_owned(), ByteString(value.to_vec()));
        put(CA, &self.ca);
        put(CERTIFICATE, &self.current.certificate);
        put(KEY, &self.current.key);
        if let Some(next) = &self.next {
            put(NEXT_CERTIFICATE, &next.certificate);
            put(NEXT_KEY, &next.key);
        }
        data
    }
}

/// What has to be done next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// There is nothing usable: make everything.
    Make,
    /// The CAs in the Secret are not those in the webhook configuration: put them there.
    Inject,
    /// It is time for a new pair: make it, beside the current one.
    Prepare,
    /// The new pair's CA is trusted: show it.
    Promote,
    /// Nobody shows the old pair any more: forget its CA.
    Prune,
    /// Nothing; look again after this long.
    Wait(Duration),
}

/// Settings of a renewal.
#[derive(Clone, Debug)]
pub struct Rules {
    /// Names that the certificate must bear.
    pub names: Vec<String>,
    /// How long a certificate lives.
    pub lifetime: Duration,
    /// How long API servers are given to see a new CA, and replicas to see a new pair.
    pub trust: Duration,
}

/// The next step. `injected` is the CA bundle of the webhook configuration, where there is one; `steady` is how long
/// Secret and configuration have been seen unchanged; `now` is in Unix seconds.
#[must_use]
pub fn plan(rules: &Rules, held: Option<&Held>, injected: Option<&[u8]>, steady: Duration, now: i64) -> Step {
    let Some(held) = held else { return Step::Make };
    let Some(facts) = read(&held.current.certificate).filter(|facts| facts.ends > now) else {
        return Step::Make;
    };
    if count(&held.ca) == 0 || held.current.key.is_empty() {
        return Step::Make;
    }
    if injected.is_some_and(|bundle| bundle != held.ca) {
        return Step::Inject;
    }
    let wait = rules.trust.saturating_sub(steady);
    if held.next.is_some() {
        return if wait.is_zero() { Step::Promote } else { Step::Wait(wait) };
    }
    if count(&held.ca) > 1 {
        return if wait.is_zero() { Step::Prune } else { Step::Wait(wait) };
    }
    let third = i64::try_from(rules.lifetime.as_secs() / 3).unwrap_or(i64::MAX);
    let renew = facts.ends.saturating_sub(third);
    let named = rules.names.iter().all(|name| facts.names.contains(name));
    if now >= renew || !named {
        return Step::Prepare;
    }
    Step::Wait(Duration::from_secs(u64::try_from(renew - now).unwrap_or(0)))
}

/// Everything made anew.
///
/// # Errors
/// [`Error::CertificateMake`].
pub fn make(rules: &Rules, now: i64) -> Result<Held, Error> {
    let (ca, current) = issue(rules, now)?;
    Ok(Held { ca, current, next: None })
}

/// A new pair beside the current one, and both CAs.
///
/// # Errors
/// [`Error::CertificateMake`].
pub fn prepare(rules: &Rules, held: &Held, now: i64) -> Result<Held, Error> {
    let (mut ca, next) = issue(rules, now)?;
    ca.extend_from_slice(&held.ca);
    Ok(Held { ca, current: held.current.clone(), next: Some(next) })
}

/// The new pair becomes the current one.
#[must_use]
pub fn promote(held: &Held) -> Held {
    let current = held.next.clone().unwrap_or_else(|| held.current.clone());
    Held { ca: held.ca.clone(), current, next: None }
}

/// Only the newest CA is kept.
#[must_use]
pub fn prune(held: &Held) -> Held {
    const END: &[u8] = b"-----END CERTIFICATE-----";
    let first = held.ca.windows(END.len()).position(|window| window == END);
    let mut ca = first.map_or_else(|| held.ca.clone(), |at| held.ca[..at + END.len()].to_vec());
    ca.push(b'\n');
    Held { ca, ..held.clone() }
}

fn issue(rules: &Rules, now: i64) -> Result<(Vec<u8>, Pair), Error> {
    try_issue(rules, now).map_err(|source| Error::CertificateMake { names: rules.names.join(", "), source })
}

fn try_issue(rules: &Rules, now: i64) -> Result<(Vec<u8>, Pair), rcgen::Error> {
    let begins = OffsetDateTime::from_unix_timestamp(now).unwrap_or(OffsetDateTime::UNIX_EPOCH) - BACKDATED;
    let ends = begins + BACKDATED + rules.lifetime;
    let key = KeyPair::generate()?;
    let mut params = CertificateParams::default();
    // Each CA has a name of its own, so that one bundle can hold two.
    params.distinguished_name.push(DnType::CommonName, format!("mullion webhook CA {now}"));
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    (params.not_before, params.not_after) = (begins, ends);
    let ca = params.self_signed(&key)?;
    let issuer = Issuer::new(params, key);
    let key = KeyPair::generate()?;
    let mut params = CertificateParams::new(rules.names.clone())?;
    params.distinguished_name.push(DnType::CommonName, "mullion webhook");
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.use_authority_key_identifier_extension = true;
    (params.not_before, params.not_after) = (begins, ends);
    let leaf = params.signed_by(&key, &issuer)?;
    let pair = Pair { certificate: leaf.pem().into_bytes(), key: key.serialize_pem().into_bytes() };
    Ok((ca.pem().into_bytes(), pair))
}

struct Read {
    ends: i64,
    names: Vec<String>,
}

/// End and names of the first certificate in `pem`.
fn read(pem: &[u8]) -> Option<Read> {
    let der = CertificateDer::pem_slice_iter(pem).next()?.ok()?;
    let (_, certificate) = parse_x509_certificate(&der).ok()?;
    let names = certificate.subject_alternative_name().ok().flatten().map(|extension| {
        let name = |name: &GeneralName<'_>| match name {
            GeneralName::DNSName(name) => Some((*name).to_owned()),
            GeneralName::IPAddress(bytes) => address(bytes),
            _ => None,
        };
        extension.value.general_names.iter().filter_map(name).collect()
    });
    Some(Read { ends: certificate.validity().not_after.timestamp(), names: names.unwrap_or_default() })
}

fn address(bytes: &[u8]) -> Option<String> {
    if let Ok(four) = <[u8; 4]>::try_from(bytes) {
        return Some(std::net::Ipv4Addr::from(four).to_string());
    }
    <[u8; 16]>::try_from(bytes).ok().map(|sixteen| std::net::Ipv6Addr::from(sixteen).to_string())
}

fn count(pem: &[u8]) -> usize {
    CertificateDer::pem_slice_iter(pem).flatten().count()
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    const DAY: i64 = 86_400;

    pub(crate) fn rules() -> Rules {
        Rules {
            names: vec!["mullion-webhook.mullion-system.svc".to_owned(), "10.0.0.1".to_owned()],
            lifetime: Duration::from_hours(90 * 24),
            trust: Duration::from_mins(1),
        }
    }

    #[test]
    fn a_renewal_never_shows_what_is_not_trusted() {
        let (rules, long) = (rules(), Duration::from_mins(10));
        let step =
            |held: &Held, injected: &[u8], steady, now| plan(&rules, Some(held), Some(injected), steady, now);
        assert_eq!(plan(&rules, None, None, long, 0), Step::Make);
        let first = make(&rules, 0).unwrap();
        assert_eq!(step(&first, b"", long, 0), Step::Inject);
        let month = Duration::from_hours(60 * 24);
        assert_eq!(step(&first, &first.ca, Duration::ZERO, 0), Step::Wait(month), "two thirds of 90 days");
        assert_eq!(step(&first, &first.ca, long, 60 * DAY), Step::Prepare);
        let second = prepare(&rules, &first, 60 * DAY).unwrap();
        assert_eq!(second.current, first.current, "the old pair is still shown");
        assert_eq!(step(&second, &first.ca, long, 60 * DAY), Step::Inject);
        let fresh = Duration::from_secs(20);
        assert_eq!(step(&second, &second.ca, fresh, 60 * DAY), Step::Wait(Duration::from_secs(40)));
        assert_eq!(step(&second, &second.ca, long, 60 * DAY), Step::Promote);
        let third = promote(&second);
        assert_ne!(third.current, first.current);
        assert_eq!(step(&third, &second.ca, Duration::ZERO, 60 * DAY), Step::Wait(rules.trust));
        assert_eq!(step(&third, &second.ca, long, 60 * DAY), Step::Prune);
        let last = prune(&third);
        assert_eq!((count(&third.ca), count(&last.ca)), (2, 1));
        assert!(third.ca.starts_with(&last.ca[..last.ca.len() - 1]), "the newest is kept");
        assert_eq!(step(&last, &third.ca, long, 60 * DAY), Step::Inject);
        assert!(matches!(step(&last, &last.ca, long, 60 * DAY), Step::Wait(_)));
    }

    #[test]
    fn what_is_unusable_is_made_anew() {
        let rules = rules();
        let good = make(&rules, 0).unwrap();
        for (case, held, now, want) in [
            ("empty", Held::default(), 0, Step::Make),
            ("expired", good.clone(), 90 * DAY, Step::Make),
            (
                "no key",
                Held { current: Pair { key: vec![], ..good.current.clone() }, ..good.clone() },
                0,
                Step::Make,
            ),
            (
                "garbage",
                Held { current: Pair { certificate: b"x".to_vec(), ..good.current.clone() }, ..good.clone() },
                0,
                Step::Make,
            ),
            ("no CA", Held { ca: vec![], ..good.clone() }, 0, Step::Make),
        ] {
            assert_eq!(plan(&rules, Some(&held), Some(&held.ca), Duration::ZERO, now), want, "{case}");
        }
        let renamed = Rules { names: vec!["other".to_owned()], ..rules };
        assert_eq!(plan(&renamed, Some(&good), Some(&good.ca), Duration::ZERO, 0), Step::Prepare);
    }

    #[test]
    fn a_secret_keeps_it_all() {
        let rules = rules();
        let first = make(&rules, 0).unwrap();
        let second = prepare(&rules, &first, 1).unwrap();
        for held in [first, second] {
            let secret = Secret { data: Some(held.data()), ..Secret::default() };
            assert_eq!(Held::read(&secret), held);
        }
        assert_eq!(Held::read(&Secret::default()), Held::default());
    }

    #[test]
    fn the_pair_serves() {
        let held = make(&rules(), 1_700_000_000).unwrap();
        let identity = super::super::tls::Identity::default();
        assert!(!identity.loaded());
        let other = make(&rules(), 1_700_000_000).unwrap();
        let mixed = identity.load("s", &held.current.certificate, &other.current.key);
        assert_eq!(mixed.unwrap_err().code(), "CertificateUnusable");
        assert!(!identity.loaded());
        identity.load("s", &held.current.certificate, &held.current.key).unwrap();
        assert!(identity.loaded());
    }
}
