"""Episodes are opened where the fewest are open, whichever shard ends its own first."""

from seeupo_jax.rollout.episode_queue import EpisodeQueue


def test_the_next_episode_is_of_the_shard_with_the_fewest_open_ones():
    queue = EpisodeQueue((1, 3), room=2)
    for key in range(6):
        queue.add(key, 1 if key < 3 else 3)
    assert [*iter(queue.next, None)] == [0, 3, 1, 4]  # in turns, until neither has room
    assert len(queue) == 2 and queue.open == {0: 1, 3: 3, 1: 1, 4: 3}
    queue.close(3)
    queue.close(4)
    assert [*iter(queue.next, None)] == [5]  # shard 1 is full, and 3 has no more
    queue.close(0)
    assert queue.next() == 2 and not queue and queue.next() is None
