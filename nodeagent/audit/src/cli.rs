//! `audit verify|list|who-had|pod`, to be mounted as a subcommand of the agent.

mod render;

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use clap::{Args, Subcommand, ValueEnum};
use jiff::Timestamp;

use crate::{AuditReader, DEFAULT_PATH, Error, Filter, Head, Holder};

/// Exit code of a question to which the log has no answer.
pub const NOTHING_FOUND: u8 = 3;

/// Reads the node's audit log; a live one as well.
#[derive(Clone, Debug, Args)]
#[command(
    after_help = "Exit codes: 0 there is an answer, 1 `verify` found something wrong, 2 the log cannot be asked, \
                        3 `who-had` or `pod` found nothing."
)]
pub struct AuditArgs {
    /// Path of the log.
    #[arg(long, global = true, env = "MULLION_AUDIT_DB", default_value = DEFAULT_PATH, value_name = "PATH")]
    pub db: PathBuf,
    /// Form of the output.
    #[arg(long, short, global = true, value_enum, default_value_t = Output::Table)]
    pub output: Output,
    /// What to ask.
    #[command(subcommand)]
    pub command: Command,
}

/// Form of the output.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Output {
    /// Aligned columns for people.
    Table,
    /// One JSON document.
    Json,
    /// One YAML document.
    Yaml,
}

/// A question to the log.
#[derive(Clone, Debug, Subcommand)]
pub enum Command {
    /// Walks the hash chain and checks the file; exit code 1 when something is wrong.
    Verify {
        /// A head noted earlier, which must be in the log: shows a tail that was cut off and a log written anew.
        #[arg(long, value_name = "SEQ:HASH")]
        expect: Option<String>,
    },
    /// Lists events, oldest first.
    List {
        /// Not before this time (RFC 3339, e.g. 2026-03-01T14:05:00Z).
        #[arg(long, value_name = "TIME")]
        since: Option<String>,
        /// Not after this time.
        #[arg(long, value_name = "TIME")]
        until: Option<String>,
        /// Only this kind, e.g. Prepared.
        #[arg(long, value_parser = clap::builder::PossibleValuesParser::new(crate::Event::KINDS))]
        kind: Option<String>,
        /// Only pods of this namespace.
        #[arg(long, short)]
        namespace: Option<String>,
        /// Only pods of this name.
        #[arg(long)]
        pod: Option<String>,
        /// Only events about this card or MIG instance; the beginning of its uuid is enough.
        #[arg(long, value_name = "UUID")]
        card: Option<String>,
        /// Only the newest so many; 0 for all.
        #[arg(long, default_value_t = 200)]
        limit: u32,
    },
    /// Says who had a card at a time; exit code 3 when nobody did.
    WhoHad {
        /// Uuid of the card, or of a MIG instance; the beginning is enough where it is clear.
        #[arg(long, value_name = "UUID")]
        card: String,
        /// When (RFC 3339, e.g. 2026-03-01T14:05:00Z); now if absent.
        #[arg(long, value_name = "TIME")]
        at: Option<String>,
    },
    /// Tells what happened to a pod; exit code 3 when the log knows nothing of it.
    Pod {
        /// Namespace and name, or the pod's UID; the beginning of that is enough where it is clear. Pods that had a name
        /// one after the other are told apart by their UID.
        #[arg(value_name = "NAMESPACE/NAME|UID")]
        pod: String,
    },
}

/// Answers on standard output; remarks go to standard error. The code is 1 where `verify` found something, and
/// [`NOTHING_FOUND`] where `who-had` or `pod` found nothing.
///
/// # Errors
/// [`Error`]; nothing was printed for it.
pub async fn run(args: &AuditArgs) -> Result<ExitCode, Error> {
    run_with(args, Timestamp::now(), &mut std::io::stdout().lock(), &mut std::io::stderr().lock())
        .await
        .map(ExitCode::from)
}

/// [`run`] with the time and both outputs given.
///
/// # Errors
/// As [`run`].
pub async fn run_with(
    args: &AuditArgs,
    now: Timestamp,
    out: &mut impl Write,
    remarks: &mut impl Write,
) -> Result<u8, Error> {
    let mut reader = AuditReader::open(&args.db).await?;
    let (text, remark, code) = match &args.command {
        Command::Verify { expect } => {
            let expected: Option<Head> = expect.as_deref().map(str::parse).transpose()?;
            let found = reader.verify(expected).await?;
            (render::verification(&found, args.output), None, u8::from(!found.is_ok()))
        }
        Command::List { since, until, kind, namespace, pod, card, limit } => {
            let filter = Filter {
                since: since.as_deref().map(|text| time("--since", text)).transpose()?,
                until: until.as_deref().map(|text| time("--until", text)).transpose()?,
                kind: kind.clone(),
                namespace: namespace.clone(),
                pod: pod.clone(),
                pod_uid: None,
                card: match card {
                    Some(card) => Some(whole(&mut reader, card).await?),
                    None => None,
                },
                limit: (*limit > 0).then_some(*limit),
            };
            let rows = reader.list(&filter).await?;
            let full = filter.limit.is_some_and(|limit| u64::from(limit) == rows.len() as u64);
            let remark = if rows.is_empty() {
                Some("no event matches".to_owned())
            } else {
                full.then(|| format!("only the newest {limit} are shown; --limit 0 shows all"))
            };
            (render::rows(&rows, args.output), remark, 0)
        }
        Command::WhoHad { card, at } => {
            let at = at.as_deref().map_or(Ok(now), |text| time("--at", text))?;
            let card = &whole(&mut reader, card).await?;
            let mut holders = reader.who_had(card, at).await?;
            holders.sort_by_key(Holder::state_since);
            let remark = match holders.is_empty() {
                false => None,
                true if reader.knows_card(card).await? => Some(format!("nobody had {card} at {at}")),
                true => Some(format!(
                    "this log has never seen card {card}: `audit list` shows the uuids of those it has"
                )),
            };
            (render::holders(&holders, args.output), remark, found(holders.is_empty()))
        }
        Command::Pod { pod } => {
            let filter = whose(&mut reader, pod).await?;
            let rows = reader.list(&filter).await?;
            let of = if pod.contains('/') { "" } else { ": by name it is NAMESPACE/NAME" };
            let remark = rows.is_empty().then(|| format!("no event of pod {pod} on this node{of}"));
            (render::rows(&rows, args.output), remark, found(rows.is_empty()))
        }
    };
    print(out, &text)?;
    if let Some(remark) = remark {
        print(remarks, &format!("{remark}\n"))?;
    }
    Ok(code)
}

const fn found(nothing: bool) -> u8 {
    if nothing { NOTHING_FOUND } else { 0 }
}

/// The rows of the pod that `pod` names, by namespace and name or by its uid.
async fn whose(reader: &mut AuditReader, pod: &str) -> Result<Filter, Error> {
    let wrong = |want| Error::Argument { flag: "pod", value: pod.to_owned(), want };
    if let Some((namespace, name)) = pod.split_once('/') {
        if namespace.is_empty() || name.is_empty() || name.contains('/') {
            return Err(wrong("NAMESPACE/NAME, e.g. default/train-0, or the pod's UID"));
        }
        let (namespace, name) = (Some(namespace.to_owned()), Some(name.to_owned()));
        return Ok(Filter { namespace, pod: name, ..Filter::default() });
    }
    if pod.is_empty() {
        return Err(wrong("NAMESPACE/NAME, e.g. default/train-0, or the pod's UID"));
    }
    let mut like = reader.pod_uids_like(pod).await?;
    let uid = match like.len() {
        0 => pod.to_owned(),
        // Of all that begin so, a whole one is first.
        _ if like.first().is_some_and(|uid| uid == pod) => pod.to_owned(),
        1 => like.remove(0),
        _ => return Err(wrong("the beginning of one UID alone: give more of it")),
    };
    Ok(Filter { pod_uid: Some(uid), ..Filter::default() })
}

/// The uuid that `card` begins; `card` itself where the log knows it whole, or none like it.
async fn whole(reader: &mut AuditReader, card: &str) -> Result<String, Error> {
    if reader.knows_card(card).await? {
        return Ok(card.to_owned());
    }
    let mut like = reader.cards_like(card).await?;
    match like.len() {
        0 => Ok(card.to_owned()),
        1 => Ok(like.remove(0)),
        _ => Err(Error::Argument {
            flag: "--card",
            value: card.to_owned(),
            want: "the beginning of one uuid alone: give more of it",
        }),
    }
}

fn time(flag: &'static str, text: &str) -> Result<Timestamp, Error> {
    text.parse().map_err(|_| Error::Argument {
        flag,
        value: text.to_owned(),
        want: "a time in RFC 3339 with an offset, e.g. 2026-03-01T14:05:00Z",
    })
}

fn print(out: &mut impl Write, text: &str) -> Result<(), Error> {
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        // `audit list | head` has seen enough.
        Err(e) if e.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        other => other.map_err(|e| Error::Output { source: Arc::new(e) }),
    }
}
