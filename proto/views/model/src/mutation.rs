use clap::ValueEnum;

/// A rule that is known to be wrong, in place of the real one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Mutation {
    /// A replica reports the newest view that it has stored and nothing else.
    OneView,
    /// A replica reports the newest of its proposed views and none of the others.
    NewestProposed,
    /// The arbiter grants a view that less than half have stored.
    LessThanHalf,
    /// A first view counts as committed when enough replicas are fenced, whether or not they have stored it.
    CountFenced,
    /// A replica that a start leaves out counts as having stored its view. Found only if a start leaves
    /// replicas out.
    CountOffenders,
    /// A starting engine takes its members from the newest proposed view alone.
    NewestMembers,
    /// A change is abandoned although the arbiter was asked for it. The arbiter grants views with members
    /// from outside of the replaced ones, and its grant counts as committed. The real arbiter and the real
    /// start each prevent the harm of giving up: the rule against it is a second line.
    GiveUpGranted,
    /// Writes in flight are not sent again to a replica that is rebuilt.
    ForgetInFlight,
    /// Views have a number but no generation, and a replica treats a view that it refuses for its number as
    /// stored.
    NoGeneration,
    /// A replica reports before it refuses the engine before.
    ServeBeforeFence,
    /// A rebuilding replica counts as a member once it has stored the view, even if others have not.
    EarlyMember,
    /// The arbiter does not mind that an engine has not honoured its last grant. Found only if hosts
    /// forget grants.
    ForgetGrant,
    /// A starting engine proposes its first view before it asks the arbiter for it.
    ProposeFirst,
    /// A running engine proposes less than half of its view.
    ProposeMinority,
    /// A start honours every proposed view, dead or not.
    KeepDead,
    /// A start honours a view that the arbiter has overruled.
    KeepOverruled,
    /// A start honours a view that a member, or more than half, have not stored.
    KeepMinority,
    /// A start that needs a grant does not honour a dead one.
    DropGrant,
    /// A proposed view is dead as soon as the arbiter has granted a later one.
    DropOlder,
    /// A proposed view is dead as soon as the arbiter has granted a later one with other members. No member
    /// of the grant has to exclude it. Found only with four replicas.
    DropOverruled,
    /// A proposed view counts as dead if it needs the storage of unreached replicas.
    DropUnseen,
    /// The arbiter continues with a record that was restored from a backup. Found only if a step restores
    /// one.
    TrustRestored,
    /// Engines draw no nonce. Found only if hosts lose their state.
    NoNonce,
    /// The same, and a replica treats a view that it refuses for its number as stored. Found only if hosts
    /// lose their state.
    UsedTwice,
}
