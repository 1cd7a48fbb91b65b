-- Writes to several tables by one statement.
--
-- Each of these views exists to be inserted into: its trigger writes the rows. A statement costs
-- more than what it writes, because with each one the thread releases the GIL and waits to get it
-- back. The views are temporary: each connection that writes creates them for itself.

-- A new run with its origin, key, slot, steps and history, without its items, jobs and timers.
-- `steps` is a JSON object, step ids to steps; `entries` its first timeline entries, if any.
CREATE TEMP VIEW beginnings AS SELECT
    NULL AS run, NULL AS id, NULL AS tenant, NULL AS workflow_id, NULL AS workflow_version,
    NULL AS created_at, NULL AS holds_slot, NULL AS key, NULL AS fingerprint, NULL AS status,
    NULL AS finished_at, NULL AS ended_at, NULL AS version, NULL AS nonce, NULL AS fence,
    NULL AS error, NULL AS output, NULL AS origin, NULL AS steps, NULL AS entries;

CREATE TEMP TRIGGER begin_run INSTEAD OF INSERT ON beginnings BEGIN
    INSERT INTO runs (
        run, id, tenant, workflow_id, workflow_version, created_at, holds_slot, key, status,
        finished_at, ended_at, version, nonce, fence, error, output
    ) VALUES (
        NEW.run, NEW.id, NEW.tenant, NEW.workflow_id, NEW.workflow_version, NEW.created_at,
        NEW.holds_slot, NEW.key, NEW.status, NEW.finished_at, NEW.ended_at, NEW.version, NEW.nonce,
        NEW.fence, NEW.error, NEW.output
    );
    INSERT INTO origins (run, origin) VALUES (NEW.run, NEW.origin);
    INSERT INTO steps (run, step_id, state)
        SELECT NEW.run, key, CAST(value AS BLOB) FROM json_each(NEW.steps);
    INSERT INTO history_lines (tenant, run, entries) VALUES (NEW.tenant, NEW.run, NEW.entries);
    -- Binds the key to this run. An expired key is replaced.
    INSERT INTO keys (tenant, key, run, fingerprint)
        SELECT NEW.tenant, NEW.key, NEW.run, NEW.fingerprint WHERE NEW.key IS NOT NULL
        ON CONFLICT (tenant, key)
        DO UPDATE SET run = excluded.run, fingerprint = excluded.fingerprint;
    -- Counts one more slot, unless the run has none, and creates the account of a new tenant.
    INSERT INTO accounts (tenant, active, seen_at) VALUES (
            NEW.tenant, NEW.holds_slot AND NEW.ended_at IS NULL AND NEW.status <> 'queued',
            NEW.created_at
        )
        ON CONFLICT (tenant) DO UPDATE SET
            active = active + excluded.active, seen_at = excluded.seen_at;
END;

-- Runs of a tenant that begin alike: see batches.py. `staged` has a row for each job, in the order of
-- the runs; the first job of a run, of kind 0, has the columns of the run. `run` and `job` are the
-- numbers of the first ones, `ticket` that of the first job, `position` that of the first run in the
-- tenant's feed; the others follow. `first` is the id of the first run, in the place of which the
-- others have their own. `kinds` is a JSON array of what the jobs of each run have in common,
-- `timers` of the timers of each run, or NULL.
CREATE TEMP TABLE staged (
    place INTEGER PRIMARY KEY, run INTEGER, kind INTEGER, id, key, fingerprint, origin, input
);

CREATE TEMP TABLE staged_kinds (
    kind INTEGER PRIMARY KEY, suffix, topic, step_id, attempt, dispatch, max_deliveries,
    attempt_timeout_ms, trace, state
);

CREATE TEMP VIEW batches AS SELECT
    NULL AS run, NULL AS count, NULL AS first, NULL AS tenant, NULL AS workflow_id,
    NULL AS workflow_version, NULL AS created_at, NULL AS status, NULL AS version, NULL AS nonce,
    NULL AS fence, NULL AS entries, NULL AS kinds, NULL AS timers, NULL AS job, NULL AS ticket,
    NULL AS position;

CREATE TEMP TRIGGER begin_batch INSTEAD OF INSERT ON batches BEGIN
    INSERT INTO staged_kinds
        SELECT
            key, value ->> 0, value ->> 1, value ->> 2, value ->> 3, value ->> 4, value ->> 5,
            value ->> 6, CAST(value ->> 7 AS BLOB), value ->> 8
        FROM json_each(NEW.kinds);
    INSERT INTO runs (
        run, id, tenant, workflow_id, workflow_version, created_at, holds_slot, key, status,
        version, nonce, fence
    ) SELECT
        NEW.run + run, id, NEW.tenant, NEW.workflow_id, NEW.workflow_version, NEW.created_at, 1,
        key, NEW.status, NEW.version, NEW.nonce, NEW.fence
        FROM staged WHERE kind = 0;
    INSERT INTO origins (run, origin) SELECT NEW.run + run, origin FROM staged WHERE kind = 0;
    INSERT INTO steps (run, step_id, state)
        SELECT NEW.run + run, step_id, CAST(replace(state, NEW.first, id) AS BLOB)
        FROM staged CROSS JOIN staged_kinds USING (kind);
    INSERT INTO history (tenant, position, run, entries)
        SELECT NEW.tenant, NEW.position + run, NEW.run + run, NEW.entries
        FROM staged WHERE kind = 0;
    INSERT INTO keys (tenant, key, run, fingerprint)
        SELECT NEW.tenant, key, NEW.run + run, fingerprint
        FROM staged WHERE kind = 0 AND key IS NOT NULL
        ON CONFLICT (tenant, key)
        DO UPDATE SET run = excluded.run, fingerprint = excluded.fingerprint;
    INSERT INTO accounts (tenant, active, seen_at) VALUES (NEW.tenant, NEW.count, NEW.created_at)
        ON CONFLICT (tenant) DO UPDATE SET
            active = active + excluded.active, seen_at = excluded.seen_at;
    INSERT INTO jobs (
        job, id, run, tenant, topic, step_id, attempt, dispatch, max_deliveries,
        attempt_timeout_ms, trace, state, ticket
    ) SELECT
        NEW.job + place, id || suffix, NEW.run + run, NEW.tenant, topic, step_id, attempt, dispatch,
        max_deliveries, attempt_timeout_ms, trace, 'ready', NEW.ticket + place
        FROM staged CROSS JOIN staged_kinds USING (kind);
    INSERT INTO job_inputs (job, input) SELECT NEW.job + place, input FROM staged;
    INSERT INTO queues (topic, tenant, turn, served, ready)
        SELECT topic, NEW.tenant, NEW.ticket + min(place), NEW.ticket + min(place), count(*)
        FROM staged CROSS JOIN staged_kinds USING (kind) GROUP BY topic
        ON CONFLICT (topic, tenant) DO UPDATE SET ready = ready + excluded.ready;
    INSERT INTO timers (run, tenant, step_id, key, due, timer)
        SELECT
            NEW.run + staged.run, NEW.tenant, value ->> 0, value ->> 1, value ->> 2,
            CAST(value ->> 3 AS BLOB)
        FROM staged CROSS JOIN json_each(NEW.timers)
        WHERE NEW.timers IS NOT NULL AND staged.kind = 0;
    INSERT INTO timer_turns (tenant, due)
        SELECT NEW.tenant, value ->> 2 FROM json_each(NEW.timers) WHERE NEW.timers IS NOT NULL
        ON CONFLICT (tenant) DO UPDATE SET due = excluded.due
        WHERE excluded.due < timer_turns.due;
    DELETE FROM staged;
    DELETE FROM staged_kinds;
END;

-- What lists show of a new run beside its row, and its labels. `texts` is a JSON array of the labels
-- as texts.
CREATE TEMP VIEW markings AS SELECT
    NULL AS run, NULL AS tenant, NULL AS created_at, NULL AS id, NULL AS risk, NULL AS labels,
    NULL AS rerun_of, NULL AS texts;

CREATE TEMP TRIGGER mark_run INSTEAD OF INSERT ON markings BEGIN
    INSERT INTO marks (run, tenant, created_at, id, risk, labels, rerun_of) VALUES (
        NEW.run, NEW.tenant, NEW.created_at, NEW.id, NEW.risk, NEW.labels, NEW.rerun_of
    );
    INSERT INTO labels (tenant, label, created_at, id, run)
        SELECT NEW.tenant, value, NEW.created_at, NEW.id, NEW.run FROM json_each(NEW.texts);
END;

-- A job that becomes ready. A dead one becomes ready again with its old fence; any other job that
-- exists is not changed.
CREATE TEMP VIEW dispatches AS SELECT
    NULL AS id, NULL AS run, NULL AS tenant, NULL AS topic, NULL AS step_id, NULL AS item,
    NULL AS attempt, NULL AS dispatch, NULL AS max_deliveries, NULL AS attempt_timeout_ms,
    NULL AS trace, NULL AS ticket, NULL AS input;

CREATE TEMP TRIGGER dispatch_job INSTEAD OF INSERT ON dispatches BEGIN
    INSERT INTO jobs (
            id, run, tenant, topic, step_id, item, attempt, dispatch, max_deliveries,
            attempt_timeout_ms, trace, state, ticket
        ) VALUES (
            NEW.id, NEW.run, NEW.tenant, NEW.topic, NEW.step_id, NEW.item, NEW.attempt,
            NEW.dispatch, NEW.max_deliveries, NEW.attempt_timeout_ms, NEW.trace, 'ready',
            NEW.ticket
        )
        ON CONFLICT (tail, head) DO UPDATE SET
            topic = excluded.topic, attempt = excluded.attempt, dispatch = excluded.dispatch,
            max_deliveries = excluded.max_deliveries,
            attempt_timeout_ms = excluded.attempt_timeout_ms, attempt_ends_at = NULL,
            trace = excluded.trace,
            state = 'ready', ticket = excluded.ticket, deliveries = 0, worker_id = NULL,
            expires_at = NULL
        WHERE state = 'dead';
    -- Each of the next two only if the one before has changed a row. The replay of a dead job may
    -- have another input.
    INSERT INTO job_inputs (job, input)
        SELECT job, NEW.input FROM jobs
        WHERE changes() AND (tail, head) = (substr(NEW.id, 3), substr(NEW.id, 1, 2))
        ON CONFLICT (job) DO UPDATE SET input = excluded.input;
    INSERT INTO queues (topic, tenant, turn, served, ready)
        SELECT NEW.topic, NEW.tenant, NEW.ticket, NEW.ticket, 1 WHERE changes()
        ON CONFLICT (topic, tenant) DO UPDATE SET ready = ready + 1;
END;

-- A timer that is set or replaced; removed if `due` is NULL. Of a run that begins in the same batch the
-- row may not be there yet.
CREATE TEMP VIEW settings_of_timers AS SELECT
    NULL AS run, NULL AS tenant, NULL AS step_id, NULL AS key, NULL AS due, NULL AS timer;

CREATE TEMP TRIGGER set_timer INSTEAD OF INSERT ON settings_of_timers BEGIN
    INSERT INTO timers (run, tenant, step_id, key, due, timer)
        SELECT NEW.run, NEW.tenant, NEW.step_id, NEW.key, NEW.due, NEW.timer
        WHERE NEW.due IS NOT NULL
        ON CONFLICT (run, step_id, key) DO UPDATE SET due = excluded.due;
    INSERT INTO timer_turns (tenant, due)
        SELECT NEW.tenant, NEW.due WHERE NEW.due IS NOT NULL
        ON CONFLICT (tenant) DO UPDATE SET due = excluded.due
        WHERE excluded.due < timer_turns.due;
    DELETE FROM timers
        WHERE NEW.due IS NULL AND run = NEW.run AND step_id = NEW.step_id AND key = NEW.key;
END;

-- The turn of a tenant whose timers were fired, or looked for: when its next one is due. If that is
-- now, the tenants before it in the order of these times come first.
CREATE TEMP VIEW passed_turns AS SELECT NULL AS tenant, NULL AS now;

CREATE TEMP TRIGGER pass_turn INSTEAD OF INSERT ON passed_turns BEGIN
    UPDATE timer_turns SET due = max(
            NEW.now, (SELECT due FROM timers WHERE tenant = NEW.tenant ORDER BY due LIMIT 1)
        )
        WHERE tenant = NEW.tenant AND EXISTS (SELECT 1 FROM timers WHERE tenant = NEW.tenant);
    DELETE FROM timer_turns
        WHERE tenant = NEW.tenant AND NOT EXISTS (SELECT 1 FROM timers WHERE tenant = NEW.tenant);
END;

-- The timeline entries of a commit, at the next position of the tenant's feed: above all positions
-- that were ever used.
CREATE TEMP VIEW history_lines AS SELECT NULL AS tenant, NULL AS run, NULL AS entries;

CREATE TEMP TRIGGER write_history INSTEAD OF INSERT ON history_lines WHEN NEW.entries IS NOT NULL
BEGIN
    INSERT INTO history (tenant, position, run, entries) VALUES (
        NEW.tenant,
        1 + max(
            coalesce((SELECT max(position) FROM history WHERE tenant = NEW.tenant), 0),
            coalesce((SELECT feed_end FROM accounts WHERE tenant = NEW.tenant), 0)
        ),
        NEW.run,
        NEW.entries
    );
END;

-- A commit: the new row of the run, the steps that changed, history, inbox, slot. `applied` is a
-- JSON array of inbox entries; `ends` tells whether the run ends with it.
CREATE TEMP VIEW commits AS SELECT
    NULL AS run, NULL AS tenant, NULL AS holds_slot, NULL AS status, NULL AS finished_at,
    NULL AS ended_at, NULL AS version, NULL AS nonce, NULL AS fence, NULL AS error, NULL AS output,
    NULL AS steps, NULL AS entries, NULL AS applied, NULL AS ends;

CREATE TEMP TRIGGER commit_run INSTEAD OF INSERT ON commits BEGIN
    UPDATE runs SET
        status = NEW.status, finished_at = NEW.finished_at, ended_at = NEW.ended_at,
        version = NEW.version, nonce = NEW.nonce, fence = NEW.fence, error = NEW.error,
        output = NEW.output
        WHERE run = NEW.run;
    INSERT INTO steps (run, step_id, state)
        SELECT NEW.run, key, CAST(value AS BLOB) FROM json_each(NEW.steps) WHERE true
        ON CONFLICT (run, step_id) DO UPDATE SET state = excluded.state;
    INSERT INTO history_lines (tenant, run, entries) VALUES (NEW.tenant, NEW.run, NEW.entries);
    -- A finished run takes no events, so its inbox and outbox row are removed. Of an unfinished run
    -- the row is due at no time if the inbox is empty.
    DELETE FROM inbox WHERE NEW.ends AND run = NEW.run;
    DELETE FROM outbox WHERE NEW.ends AND run = NEW.run;
    DELETE FROM shared_runs WHERE NEW.ends AND run = NEW.run;
    UPDATE accounts SET active = max(0, active - 1)
        WHERE NEW.ends AND NEW.holds_slot AND tenant = NEW.tenant;
    DELETE FROM inbox WHERE NOT NEW.ends AND run = NEW.run
        AND entry_id IN (SELECT value FROM json_each(NEW.applied));
    UPDATE outbox SET due = NULL
        WHERE NOT NEW.ends AND run = NEW.run AND due IS NOT NULL
        AND NOT EXISTS (SELECT 1 FROM inbox WHERE run = NEW.run);
END;

-- An entry for the inbox of a run, once per `entry_id`. The run's outbox row becomes due at `due`,
-- or stays due earlier.
CREATE TEMP VIEW arrivals AS SELECT
    NULL AS run, NULL AS ticket, NULL AS entry_id, NULL AS event, NULL AS due;

CREATE TEMP TRIGGER put_entry INSTEAD OF INSERT ON arrivals BEGIN
    INSERT INTO inbox (run, ticket, entry_id, event)
        VALUES (NEW.run, NEW.ticket, NEW.entry_id, NEW.event)
        ON CONFLICT (run, entry_id) DO NOTHING;
    INSERT INTO outbox (run, number, turn, due)
        SELECT NEW.run, 1, NEW.ticket, NEW.due WHERE changes()
        ON CONFLICT (run) DO UPDATE SET
            number = number + 1,
            turn = iif(due <= excluded.due, turn, excluded.turn),
            due = iif(due <= excluded.due, due, excluded.due);
END;

-- A result: ends the lease and posts the event to the run, unless `entry_id` is NULL.
CREATE TEMP VIEW results AS SELECT
    NULL AS job, NULL AS worker_id, NULL AS run, NULL AS ticket, NULL AS entry_id, NULL AS event,
    NULL AS due;

CREATE TEMP TRIGGER accept_result INSTEAD OF INSERT ON results BEGIN
    UPDATE jobs SET
        state = 'finished', worker_id = NEW.worker_id, expires_at = NULL, progress = NULL
        WHERE job = NEW.job;
    INSERT INTO arrivals (run, ticket, entry_id, event, due)
        SELECT NEW.run, NEW.ticket, NEW.entry_id, NEW.event, NEW.due
        WHERE NEW.entry_id IS NOT NULL;
END;

-- A run that has ended with work left: removes its approvals and timers, and revokes its jobs.
CREATE TEMP VIEW stops AS SELECT NULL AS run;

CREATE TEMP TRIGGER stop_run INSTEAD OF INSERT ON stops BEGIN
    DELETE FROM approvals WHERE run = NEW.run;
    DELETE FROM timers WHERE run = NEW.run;
    UPDATE queues SET ready = ready - (
            SELECT count(*) FROM jobs WHERE jobs.run = NEW.run AND jobs.state = 'ready'
            -- The sign keeps the planner from reading all ready jobs of the queue.
            AND +jobs.topic = queues.topic AND +jobs.tenant = queues.tenant
        )
        WHERE (topic, tenant) IN (
            SELECT topic, tenant FROM jobs WHERE run = NEW.run AND state = 'ready'
        );
    DELETE FROM queues WHERE ready <= 0 AND (topic, tenant) IN (
            SELECT topic, tenant FROM jobs WHERE run = NEW.run AND state = 'ready'
        );
    UPDATE jobs SET
        state = 'revoked', ticket = NULL, worker_id = NULL, expires_at = NULL, progress = NULL
        WHERE run = NEW.run AND state IN ('ready', 'leased');
END;

-- A job that is leased. Its queue moves to the tail of its ring with one job less; an empty queue
-- is removed.
CREATE TEMP VIEW leasings AS SELECT
    NULL AS job, NULL AS fence, NULL AS deliveries, NULL AS worker_id, NULL AS expires_at,
    NULL AS attempt_ends_at, NULL AS topic, NULL AS tenant, NULL AS turn;

CREATE TEMP TRIGGER lease_job INSTEAD OF INSERT ON leasings BEGIN
    UPDATE jobs SET
        state = 'leased', ticket = NULL, fence = NEW.fence, deliveries = NEW.deliveries,
        worker_id = NEW.worker_id, expires_at = NEW.expires_at,
        attempt_ends_at = NEW.attempt_ends_at, usage = NULL
        WHERE job = NEW.job;
    UPDATE queues SET turn = NEW.turn, served = NEW.turn, ready = ready - 1
        WHERE topic = NEW.topic AND tenant = NEW.tenant;
    DELETE FROM queues WHERE topic = NEW.topic AND tenant = NEW.tenant AND ready <= 0;
END;
