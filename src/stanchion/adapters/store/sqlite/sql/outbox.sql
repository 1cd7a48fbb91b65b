-- Timers that are due, and runs that must be advanced.

-- name: timer_turns
-- Answers (tenant): those that may have due timers, each in its turn.
SELECT tenant FROM timer_turns WHERE due <= :now ORDER BY due, tenant LIMIT :limit OFFSET :skip

-- name: due_timers
-- Answers (run, run_id, ended_at, step_id, key, due, timer) of a tenant, earliest first.
SELECT
    timers.run, runs.id, runs.ended_at, timers.step_id, timers.key, timers.due, timers.timer
FROM timers JOIN runs ON runs.run = timers.run
WHERE timers.tenant = :tenant AND timers.due <= :now ORDER BY timers.due LIMIT :limit

-- name: pass_timer_turn
-- Sets a tenant's turn by its next timer; behind those of others if that is due. See together.sql.
INSERT INTO passed_turns (tenant, now) VALUES (:tenant, :now)

-- name: remove_timer
-- Removes a timer that has fired.
DELETE FROM timers WHERE run = :run AND step_id = :step_id AND key = :key

-- name: due_rows
-- Answers (run, run_id, tenant, number), earliest first.
SELECT outbox.run, runs.id, runs.tenant, outbox.number
FROM outbox JOIN runs ON runs.run = outbox.run
WHERE outbox.due <= :now ORDER BY outbox.due, outbox.turn LIMIT :limit

-- name: hold_row
-- Makes a row due again at :due, unless it is confirmed before.
UPDATE outbox SET due = :due, turn = :turn WHERE run = :run

-- name: defer_row
-- Makes a row due later, if its number has not changed.
UPDATE outbox SET due = :due, turn = :turn
WHERE run = (
    SELECT run FROM runs WHERE (tail, head) = (substr(:run_id, 3), substr(:run_id, 1, 2))
) AND number = :number AND due IS NOT NULL

-- name: confirm_row
-- Makes a row due at no time, if its number has not changed and the inbox is empty.
UPDATE outbox SET due = NULL
WHERE run = (
    SELECT run FROM runs WHERE (tail, head) = (substr(:run_id, 3), substr(:run_id, 1, 2))
) AND number = :number AND due IS NOT NULL
    AND NOT EXISTS (SELECT 1 FROM inbox WHERE inbox.run = outbox.run)

-- name: count_rows
-- Answers (count): the number of rows with a due time.
SELECT count(*) FROM outbox WHERE due IS NOT NULL
