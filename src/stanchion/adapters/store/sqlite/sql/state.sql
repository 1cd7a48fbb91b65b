-- Items: one row each, so that a commit writes only those that changed.

-- name: put_item
-- Writes the current state of an item.
INSERT INTO items (run, step_id, item, state) VALUES (:run, :step_id, :item, :state)
ON CONFLICT (run, step_id, item) DO UPDATE SET state = excluded.state

-- name: read_items
-- Answers (item, state) of the items in :items, a JSON array.
SELECT item, state FROM items
WHERE run = (
    SELECT run FROM runs WHERE (tail, head) = (substr(:run_id, 3), substr(:run_id, 1, 2))
) AND step_id = :step_id
    AND item IN (SELECT value FROM json_each(:items))
