"""The keeper: starts each engine behind its walls, holds its channel, ends it. Tiny on purpose.

Words: a *verb* is one of the few things that the daemon can ask for (`verbs`); a *slot* is a number from which a
sandbox's two host ids follow; a *record* is the small file that says, before each effect, what is about to
exist (`records`); the *view* is the keeper's private mount of the few directories that an engine may see
(`view`); to *seal* is to end the helper that an engine needs only at its start; to *adopt* is to give a successor
the channel descriptors that the daemon kept; a *bare* process (the converter) gets all its walls from the keeper.

An interceptor's channel alone is not held: it has secrets, so it ends with its daemon.

It runs as "root" of one big user namespace, which outside is an ordinary user without any capability. It builds
every command line itself from an `engines.spec.SandboxSpec`, assigns uids, pids and cgroups itself, and takes
no path from a message. It can be killed at any moment: a successor reads the records and finishes or undoes.

Deliberately absent: reading a channel, a control socket or anything else that a guest, a sentry or the network
wrote; any import but the standard library, `engines.plan`, `engines.spec` and the engines' pure `command` modules; asyncio,
logging frameworks, configuration files. `client` is the daemon's side and is not loaded by the keeper process.
"""
