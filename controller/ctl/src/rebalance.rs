//! Moves replicas to better places, a few at a time, until no move is left.

use std::time::Duration;

use shorthorn_api::v1;
use shorthorn_api::v1::controller_client::ControllerClient;
use shorthorn_api::v1::rebalance_request::Mode;
use tokio::time::{Instant, sleep, timeout_at};
use tonic::transport::Channel;

use super::args::RebalanceArgs;
use super::error::{CtlError, is_unreachable};
use super::wait::{HELD_LIMIT, ProgressLine};

/// The longest that one question may take: the controller looks at all volumes and all nodes.
const CALL_LIMIT: Duration = Duration::from_secs(60);
/// The least time between two questions.
const POLL: Duration = Duration::from_millis(500);

/// Returns the last answer of the controller, and the number of all moves.
pub(super) async fn rebalance(
    client: &mut ControllerClient<Channel>,
    server: &str,
    args: RebalanceArgs,
) -> Result<(v1::RebalanceResponse, usize), CtlError> {
    let mode = match (args.dry_run, args.cancel) {
        (true, _) => Mode::DryRun,
        (_, true) => Mode::Cancel,
        _ => Mode::Begin,
    };
    let wanted = v1::RebalanceRequest { volumes: args.volumes, max_moves: args.max_moves, mode: mode.into() };
    if mode == Mode::Begin && !args.no_wait {
        return until_even(client, server, &wanted, args.timeout).await;
    }
    let answer = ask(client, &wanted).await.map_err(|status| CtlError::of(&status, server))?;
    let begun = count_begun(&answer);
    Ok((answer, begun))
}

async fn ask(
    client: &mut ControllerClient<Channel>,
    wanted: &v1::RebalanceRequest,
) -> Result<v1::RebalanceResponse, tonic::Status> {
    let mut request = tonic::Request::new(wanted.clone());
    request.set_timeout(CALL_LIMIT);
    client.rebalance(request).await.map(tonic::Response::into_inner)
}

fn count_begun(answer: &v1::RebalanceResponse) -> usize {
    answer.moves.iter().filter(|found| found.begun).count()
}

/// Asks until no move is left; each question begins as many moves as have ended. If all running moves are
/// held for a while, only the operator can continue.
async fn until_even(
    client: &mut ControllerClient<Channel>,
    server: &str,
    wanted: &v1::RebalanceRequest,
    limit: Duration,
) -> Result<(v1::RebalanceResponse, usize), CtlError> {
    let deadline = Instant::now() + limit;
    let progress = ProgressLine::start();
    let mut begun = 0;
    let mut held_since = None;
    loop {
        let asked = Instant::now();
        let state = match ask(client, wanted).await {
            Ok(answer) => {
                begun += count_begun(&answer);
                if answer.moves.is_empty() && answer.under_way.is_empty() {
                    return Ok((answer, begun));
                }
                let held = !answer.under_way.is_empty() && answer.under_way.iter().all(|left| left.held);
                held_since = held.then(|| held_since.unwrap_or_else(Instant::now));
                describe(&answer)
            }
            // A controller that restarts comes back.
            Err(error) if is_unreachable(&error) && Instant::now() < deadline => error.message().to_owned(),
            Err(error) => return Err(CtlError::of(&error, server)),
        };
        progress.say(state.lines().next().unwrap_or_default());
        if held_since.is_some_and(|since| since.elapsed() >= HELD_LIMIT) {
            return Err(CtlError::Refused(format!(
                "{state}\nThe controller continues as soon as possible; shorthornctl rebalance --cancel \
                 cancels the moves"
            )));
        }
        if timeout_at(deadline, sleep(POLL.max(asked.elapsed()))).await.is_err() {
            return Err(CtlError::Timeout(format!(
                "{state}\nMoves that have started continue; run the command again for the rest"
            )));
        }
    }
}

/// Returns the progress for people.
pub(super) fn describe(answer: &v1::RebalanceResponse) -> String {
    let (begun, moves) = (count_begun(answer), answer.moves.len());
    let mut text = format!(
        "{} replicas are being moved, {} more would be better elsewhere",
        answer.under_way.len() + begun,
        moves - begun
    );
    for left in &answer.under_way {
        let held = if left.held { " (held)" } else { "" };
        text.push_str(&format!("\n- replica {}{held}: {}", left.replica, left.message));
    }
    for found in &answer.moves {
        let (state, from) = (if found.begun { "moves" } else { "would move" }, &found.from_node);
        text.push_str(&format!(
            "\n- replica {} {state} from {from} {} to {} {}, {}",
            found.replica, found.from_disk, found.to_node, found.to_disk, found.gain
        ));
    }
    for left_out in &answer.left_out {
        text.push_str(&format!("\nNot checked: {} volumes, {}", left_out.volumes, left_out.reason));
    }
    text
}
