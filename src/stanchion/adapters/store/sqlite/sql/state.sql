-- Items: one row each, so that a commit writes only those that changed.

-- name: put_item
-- Writes the current state of an item.
INSERT INTO items (run, step_id, item, state) VALUES (:run, :step_id, :item, :state)
ON CONFLICT (run, step_id, item) DO UPDATE SET state = excluded.state

-- name: put_item_block
-- Writes the states of items that follow each other, unless the block exists.
INSERT INTO item_blocks (run, step_id, block, first, states)
VALUES (:run, :step_id, :block, :first, :states)
ON CONFLICT (run, step_id, block) DO NOTHING

-- name: replace_items
-- Removes earlier states of the items of a new block.
DELETE FROM items WHERE run = :run AND step_id = :step_id AND item BETWEEN :first AND :last

-- name: read_item_blocks
-- Answers (first, states) of the blocks in :blocks, a JSON array.
SELECT first, states FROM item_blocks
WHERE run = (
    SELECT run FROM runs WHERE (tail, head) = (substr(:run_id, 3), substr(:run_id, 1, 2))
) AND step_id = :step_id
    AND block IN (SELECT value FROM json_each(:blocks))

-- name: read_items
-- Answers (item, state) of the items in :items, a JSON array.
SELECT item, state FROM items
WHERE run = (
    SELECT run FROM runs WHERE (tail, head) = (substr(:run_id, 3), substr(:run_id, 1, 2))
) AND step_id = :step_id
    AND item IN (SELECT value FROM json_each(:items))
