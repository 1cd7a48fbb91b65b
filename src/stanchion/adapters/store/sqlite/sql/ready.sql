-- The ready index: queues of jobs by topic and tenant, and for each topic a ring of tenants.

-- name: enter_queue
-- Counts one more job. A queue that was empty is a new row, at the tail of its ring.
INSERT INTO queues (topic, tenant, turn, served, ready) VALUES (:topic, :tenant, :turn, :turn, 1)
ON CONFLICT (topic, tenant) DO UPDATE SET ready = ready + 1

-- name: leave_queue
-- Counts so many jobs less. Answers (ready): how many are left.
UPDATE queues SET ready = ready - :count WHERE topic = :topic AND tenant = :tenant
RETURNING ready

-- name: remove_queue
-- Removes an empty queue.
DELETE FROM queues WHERE topic = :topic AND tenant = :tenant

-- name: head_of_ring
-- Answers (turn, served, topic, tenant): the next queues of a topic, in order.
SELECT turn, served, topic, tenant FROM queues
WHERE topic = :topic ORDER BY turn, served LIMIT :limit

-- name: topics_with_queues
-- Answers (topic): those of these topics, a JSON array, for which any job is ready.
SELECT value FROM json_each(:topics) WHERE EXISTS (SELECT 1 FROM queues WHERE topic = value)

-- name: queues_of_tenant
-- Like head_of_ring, for one tenant and many topics, a JSON array.
SELECT turn, served, topic, tenant FROM queues
WHERE topic IN (SELECT value FROM json_each(:topics)) AND tenant = :tenant

-- name: move_queues
-- Moves a tenant's queues for these topics, a JSON array, to the tail of their rings.
UPDATE queues SET turn = :turn
WHERE topic IN (SELECT value FROM json_each(:topics)) AND tenant = :tenant

-- name: oldest_ready_jobs
-- Answers (ticket, job, id, run_id, step_id, item, attempt, dispatch, max_deliveries,
-- attempt_timeout_ms, attempt_ends_at, trace, fence, deliveries, input).
SELECT
    jobs.ticket, jobs.job, jobs.id, runs.id, jobs.step_id, jobs.item, jobs.attempt, jobs.dispatch,
    jobs.max_deliveries, jobs.attempt_timeout_ms, jobs.attempt_ends_at, jobs.trace, jobs.fence,
    jobs.deliveries, job_inputs.input
FROM jobs
JOIN runs ON runs.run = jobs.run
JOIN job_inputs ON job_inputs.job = jobs.job
WHERE jobs.state = 'ready' AND jobs.topic = :topic AND jobs.tenant = :tenant
    AND jobs.ticket > :after
ORDER BY jobs.ticket LIMIT :limit

-- name: lease_job
-- Leases a job to a worker and moves its queue to the tail of its ring, see together.sql.
INSERT INTO leasings (
    job, fence, deliveries, worker_id, expires_at, attempt_ends_at, topic, tenant, turn
) VALUES (
    :job, :fence, :deliveries, :worker_id, :expires_at, :attempt_ends_at, :topic, :tenant, :turn
)

-- name: count_ready
-- Answers (topic, ready).
SELECT topic, sum(ready) FROM queues GROUP BY topic

-- name: oldest_ready
-- Answers (id): the job that became ready first, of one tenant or, if it is NULL, of all. Looks at
-- the first job of each queue.
SELECT jobs.id FROM (
    SELECT topic, tenant, (
        SELECT min(head.ticket) FROM jobs AS head
        WHERE head.state = 'ready' AND head.topic = queues.topic AND head.tenant = queues.tenant
    ) AS ticket
    FROM queues WHERE :tenant IS NULL OR tenant = :tenant
    ORDER BY ticket NULLS LAST LIMIT 1
) AS oldest
JOIN jobs ON jobs.state = 'ready' AND jobs.topic = oldest.topic AND jobs.tenant = oldest.tenant
    AND jobs.ticket = oldest.ticket

-- name: ready_in_ring
-- Answers (tenant, ready): the next tenants of a topic, in order, with the number of their jobs.
SELECT tenant, ready FROM queues WHERE topic = :topic ORDER BY turn, served LIMIT :limit

-- name: ready_of_tenant
-- Like ready_in_ring, for one tenant.
SELECT tenant, ready FROM queues WHERE topic = :topic AND tenant = :tenant
