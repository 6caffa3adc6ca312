"""Episodes are opened where the fewest are open, whichever shard ends its own first."""

from seeupo_jax.rollout.episode import EpisodeRequest
from seeupo_jax.rollout.episode_queue import EpisodeQueue, deal_more


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


def test_further_requests_go_to_the_shards_with_the_fewest_open_and_waiting_ones():
    queue = EpisodeQueue((1, 3), room=2)
    for key in range(3):
        queue.add(key, 1)
    assert queue.next() == 0 and queue.loads == {1: 3, 3: 0}
    requests = [EpisodeRequest("task", group=9, member=member) for member in range(5)]
    dealt = deal_more(requests, queue)
    assert [request.shard for request in dealt] == [1, 3, 3, 3, 3]
    assert [request.member for request in dealt] == [0, 1, 2, 3, 4]
    assert deal_more([], queue) == []
