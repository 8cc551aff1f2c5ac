//! The text of a client's error. Of an answer that reports an error only its status and code are
//! kept: the answer itself may repeat whose key was used.

use std::fmt;

/// Longest text of an error, letters: of a longer one this much of its beginning, and its end.
const TEXT: usize = 600;
const TEXT_BEGINS: usize = 250;
/// Longest code of an error, and longest name of a region.
const CODE: usize = 64;
/// Behind these the client repeats an answer.
const REPEATED: [&str; 4] = [
    " response: ",
    "CONTENT_RANGE header: ",
    "Invalid content length ",
    "Invalid last modified ",
];

/// The text of a client's error, in one line of bounded length. Of the server's answer it has the
/// code alone. The last cause is added, unless it names an address.
#[derive(Debug, Clone)]
pub(super) struct ErrorText(pub(super) String);

impl ErrorText {
    pub(super) fn of(error: &object_store::Error) -> Self {
        let text = error.to_string();
        let behind = |words: &&str| text.find(*words).map(|at| at + words.len());
        let repeated = REPEATED.iter().filter_map(behind).min();
        let end = repeated.into_iter().chain(text.find('<')).min();
        let (said, answer) = text.split_at(end.unwrap_or(text.len()));
        let mut told = format!("{} {}", said.trim_end(), code_in(answer));
        if let Some(cause) = causes(error).last().map(ToString::to_string)
            && !cause.contains("://")
            && !cause.contains(['<', '\n', '\r'])
            && repeated.is_none()
            && !told.contains(&cause)
        {
            told = format!("{}: {cause}", told.trim_end());
        }
        Self(one_line(&told))
    }
}

/// A text of others in one line of bounded length.
pub(super) fn one_line(text: &str) -> String {
    let letters = text.trim().chars();
    let line: Vec<char> = letters
        .map(|letter| if letter.is_control() { ' ' } else { letter })
        .collect();
    if line.len() <= TEXT {
        return line.into_iter().collect();
    }
    let begins: String = line[..TEXT_BEGINS].iter().collect();
    let ends: String = line[line.len() - (TEXT - TEXT_BEGINS)..].iter().collect();
    format!("{begins} ... {ends}")
}

impl fmt::Display for ErrorText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for ErrorText {}

/// The causes of an error, one after the other.
pub(super) fn causes(
    error: &object_store::Error,
) -> impl Iterator<Item = &(dyn std::error::Error + 'static)> {
    std::iter::successors(std::error::Error::source(error), |error| error.source())
}

/// The code of an error that a server writes in XML; empty where there is none.
pub(super) fn code_in(text: &str) -> String {
    let code = text.split_once("<Code>").map_or("", |(_, rest)| rest);
    code.split_once("</Code>")
        .map_or_else(String::new, |(code, _)| plain(code))
}

/// The beginning of a word, without letters that belong in no word.
pub(super) fn plain(word: &str) -> String {
    let fits = |letter: &char| letter.is_ascii_alphanumeric() || "._-".contains(*letter);
    word.chars().filter(fits).take(CODE).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_has_the_code_of_an_answer_and_no_more() {
        let answer = "PUT http://h/b in 3ms - Server returned non-2xx status code: 403 Forbidden: \
                      <?xml?><Error>\
                      <Code>InvalidAccessKeyId</Code><AWSAccessKeyId>AKIA</AWSAccessKeyId></Error>";
        let error = object_store::Error::Generic {
            store: "S3",
            source: answer.into(),
        };
        let told = ErrorText::of(&error).0;
        assert!(
            told.ends_with("403 Forbidden: InvalidAccessKeyId") && !told.contains("AKIA"),
            "{told}"
        );
    }
}
