//! `/metrics` of Mullion's programs: plain HTTP, text format.

use std::collections::BTreeMap;

use anyhow::{Context, Result, bail};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// One scrape: series, as written with its labels, -> value.
#[derive(Clone, Debug, Default)]
pub struct Scrape(BTreeMap<String, f64>);

/// Scrapes `address` (host:port).
///
/// # Errors
/// When nobody answers there, or not with 200.
pub async fn scrape(address: &str) -> Result<Scrape> {
    let ask = async {
        let mut stream = TcpStream::connect(address).await?;
        // HTTP/1.0: no chunks, and the end of the stream is the end of the body.
        stream.write_all(format!("GET /metrics HTTP/1.0\r\nHost: {address}\r\n\r\n").as_bytes()).await?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await?;
        std::io::Result::Ok(answer)
    };
    let answer = ask.await.with_context(|| format!("cannot scrape http://{address}/metrics"))?;
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or((&answer, ""));
    if !head.lines().next().is_some_and(|line| line.contains(" 200")) {
        bail!("http://{address}/metrics answered {:?}", head.lines().next().unwrap_or_default());
    }
    Ok(parse(body))
}

/// Reads the text format, Prometheus' or OpenMetrics'.
pub fn parse(text: &str) -> Scrape {
    let series = text.lines().filter(|line| !line.starts_with('#')).filter_map(|line| {
        // Labels may hold spaces; values and times do not. An exemplar follows " # ".
        let line = line.split(" # ").next()?;
        let end = line.rfind('}').map_or_else(|| line.find(' '), |brace| Some(brace + 1))?;
        let (series, value) = line.split_at(end);
        Some((series.to_owned(), value.split_whitespace().next()?.parse().ok()?))
    });
    Scrape(series.collect())
}

/// How often and how long something happened.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Histogram {
    /// How often.
    pub count: f64,
    /// Sum of what was observed.
    pub sum: f64,
    /// Upper bound -> how often at most that; ascending, the last one infinite.
    pub buckets: Vec<(f64, f64)>,
}

impl Scrape {
    /// The histogram `name` of the series that have all of `labels` (each as `key="value"`), summed.
    pub fn histogram(&self, name: &str, labels: &[&str]) -> Histogram {
        let mut histogram = Histogram::default();
        for (series, value) in &self.0 {
            let Some(rest) = series.strip_prefix(name) else { continue };
            if !labels.iter().all(|label| rest.contains(label)) {
                continue;
            }
            if rest.starts_with("_count") {
                histogram.count += value;
            } else if rest.starts_with("_sum") {
                histogram.sum += value;
            } else if rest.starts_with("_bucket") {
                let bound = rest.split("le=\"").nth(1).and_then(|rest| rest.split('"').next());
                let Some(bound) = bound.and_then(|bound| bound.parse::<f64>().ok()) else { continue };
                histogram.add(bound, *value);
            }
        }
        histogram
    }
}

impl Histogram {
    fn add(&mut self, bound: f64, count: f64) {
        match self.buckets.binary_search_by(|(known, _)| known.total_cmp(&bound)) {
            Ok(at) => self.buckets[at].1 += count,
            Err(at) => self.buckets.insert(at, (bound, count)),
        }
    }

    /// What was observed since `before`.
    #[must_use]
    pub fn since(&self, before: &Self) -> Self {
        let earlier = |bound: f64| {
            let at = before.buckets.binary_search_by(|(known, _)| known.total_cmp(&bound));
            at.map_or(0.0, |at| before.buckets[at].1)
        };
        Self {
            count: self.count - before.count,
            sum: self.sum - before.sum,
            buckets: self.buckets.iter().map(|&(bound, count)| (bound, count - earlier(bound))).collect(),
        }
    }

    /// Both together.
    #[must_use]
    pub fn plus(&self, other: &Self) -> Self {
        let mut sum = self.clone();
        sum.count += other.count;
        sum.sum += other.sum;
        for &(bound, count) in &other.buckets {
            sum.add(bound, count);
        }
        sum
    }

    /// Mean of what was observed; 0 for nothing.
    pub fn mean(&self) -> f64 {
        if self.count > 0.0 { self.sum / self.count } else { 0.0 }
    }

    /// The bounds of the bucket in which the quantile (0 to 1) lies: all that a histogram knows.
    pub fn quantile(&self, quantile: f64) -> (f64, f64) {
        let wanted = (quantile * self.count).ceil();
        let mut low = 0.0;
        for &(bound, count) in &self.buckets {
            if count >= wanted {
                return (low, bound);
            }
            low = bound;
        }
        (low, f64::INFINITY)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "# HELP mullion_call_duration_seconds Time\n\
        mullion_call_duration_seconds_sum{call=\"filter\"} 0.5\n\
        mullion_call_duration_seconds_count{call=\"filter\"} 4\n\
        mullion_call_duration_seconds_bucket{le=\"0.1\",call=\"filter\"} 3\n\
        mullion_call_duration_seconds_bucket{le=\"1.0\",call=\"filter\"} 4\n\
        mullion_call_duration_seconds_bucket{le=\"+Inf\",call=\"filter\"} 4\n\
        mullion_call_duration_seconds_count{call=\"bind\"} 9\n\
        leader 1\nodd{a=\"x y\"} 2 1700000000\n# EOF\n";

    #[test]
    #[expect(clippy::float_cmp, reason = "read back as written")]
    fn reads_series_and_histograms() {
        let scrape = parse(TEXT);
        assert_eq!(scrape.0["leader"], 1.0);
        assert_eq!(scrape.0["odd{a=\"x y\"}"], 2.0);
        let filter = scrape.histogram("mullion_call_duration_seconds", &["call=\"filter\""]);
        assert_eq!((filter.count, filter.sum, filter.buckets.len()), (4.0, 0.5, 3));
        assert_eq!(filter.mean(), 0.125);
        assert_eq!(filter.quantile(0.5), (0.0, 0.1));
        assert_eq!(filter.quantile(0.99), (0.1, 1.0));
        assert_eq!(filter.since(&filter).count, 0.0);
        assert_eq!(filter.plus(&filter).buckets[0], (0.1, 6.0));
        assert_eq!(filter.since(&Histogram::default()), filter);
    }
}
