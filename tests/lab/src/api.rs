//! The few API requests that bringing the lab up needs, over `kubectl proxy` on a unix socket: no TLS here, and no
//! program start per request.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::layout;

/// An answer: status code and body.
#[derive(Debug)]
pub struct Answer {
    /// HTTP status code.
    pub code: u16,
    /// The body, JSON but for the health endpoints.
    pub body: String,
}

impl Answer {
    /// The body as JSON.
    ///
    /// # Errors
    /// When the code is not one of success, or the body is no JSON.
    pub fn json(self) -> Result<Value> {
        if !(200..300).contains(&self.code) {
            bail!("the API server answered {}: {}", self.code, self.body.trim());
        }
        serde_json::from_str(&self.body).context("the API server's answer is no JSON")
    }
}

/// Sends one request and reads the whole answer; `APPLY` is the patch that server-side apply uses.
pub fn request(method: &str, path: &str, body: Option<&Value>) -> Result<Answer> {
    let mut reader = open(method, path, body, Duration::from_secs(20))?;
    let code = head(&mut reader)?;
    let mut body = String::new();
    reader.read_to_string(&mut body).with_context(|| format!("{method} {path}: the answer broke off"))?;
    Ok(Answer { code, body })
}

/// `GET` as JSON.
pub fn get(path: &str) -> Result<Value> {
    request("GET", path, None)?.json().with_context(|| format!("GET {path}"))
}

/// Server-side apply, as the lab's own field manager.
pub fn apply(path: &str, object: &Value) -> Result<()> {
    let path = format!("{path}?fieldManager=mullion-lab&force=true&fieldValidation=Strict");
    request("APPLY", &path, Some(object))?.json().map(drop)
}

/// Follows a watch: one line of JSON per event, until the API server ends it or `idle` passes without one.
pub fn watch(path: &str, idle: Duration) -> Result<impl Iterator<Item = String>> {
    let mut reader = open("GET", path, None, idle)?;
    let code = head(&mut reader)?;
    if code != 200 {
        bail!("GET {path}: the API server answered {code}");
    }
    Ok(reader.lines().map_while(Result::ok))
}

fn open(method: &str, path: &str, body: Option<&Value>, idle: Duration) -> Result<BufReader<UnixStream>> {
    let socket = layout::run("api.sock");
    let mut stream =
        UnixStream::connect(&socket).with_context(|| format!("cannot reach {}", socket.display()))?;
    stream.set_read_timeout(Some(idle))?;
    let body = body.map(Value::to_string).unwrap_or_default();
    let (method, kind) = match method {
        "APPLY" => ("PATCH", "application/apply-patch+yaml"),
        _ => (method, "application/json"),
    };
    // Version 1.0: the answer ends with the connection, so no chunked encoding.
    let head = format!(
        "{method} {path} HTTP/1.0\r\nHost: localhost\r\nUser-Agent: mullion-lab\r\nAccept: application/json\r\n\
         Content-Type: {kind}\r\nContent-Length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes())?;
    stream.write_all(body.as_bytes())?;
    Ok(BufReader::new(stream))
}

/// Reads the status line and skips the headers.
fn head(reader: &mut impl BufRead) -> Result<u16> {
    let mut line = String::new();
    reader.read_line(&mut line).context("no answer")?;
    let code = line.split(' ').nth(1).and_then(|code| code.parse().ok());
    let code = code.with_context(|| format!("not an HTTP answer: {line:?}"))?;
    loop {
        line.clear();
        if reader.read_line(&mut line)? == 0 || line == "\r\n" {
            return Ok(code);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_the_head_and_leaves_the_body() {
        let mut reader = BufReader::new(&b"HTTP/1.0 404 Not Found\r\nX: y\r\n\r\nbody"[..]);
        assert_eq!(head(&mut reader).unwrap(), 404);
        let mut rest = String::new();
        reader.read_to_string(&mut rest).unwrap();
        assert_eq!(rest, "body");
        assert!(head(&mut BufReader::new(&b"nonsense\r\n"[..])).is_err(), "no code");
    }
}
