"""Requests to the simulator of public posts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from seeupo_jax.instruments.bfcl_worlds import world_words as words
from seeupo_jax.instruments.bfcl_worlds.draft import Draft, UserMessage, requests
from seeupo_jax.instruments.bfcl_worlds.scenarios import POSTS


def sign_in(draft: Draft) -> str:
    """Signs in if no user is signed in; returns the user's note about it."""
    account = draft.simulator(POSTS)
    if account.authenticated:
        return ""
    draft.call("authenticate_twitter", username=account.username, password=account.password)
    return draft.rng.choice(
        (
            f" My account is '{account.username}', its password '{account.password}'.",
            f" You have to authenticate as '{account.username}' with '{account.password}'.",
        )
    )


def _post(draft: Draft, mine: bool | None = None) -> dict[str, Any]:
    account = draft.simulator(POSTS)
    posts = account.tweets.values()
    return draft.choose(
        [p for p in posts if mine is None or (p["username"] == account.username) == mine]
    )


def _stranger(draft: Draft) -> str:
    account = draft.simulator(POSTS)
    usernames = {account.username, *account.following_list}
    return draft.choose([name for name in words.HANDLES if name not in usernames])


def publish(draft: Draft) -> UserMessage:
    note = sign_in(draft)
    text = f"{words.sentence(draft.rng)}."
    draft.set_fact("tweet", draft.call("post_tweet", content=text)["id"])
    return draft.phrase(
        "Tweet '{text}' and nothing more.",
        "Put this out on my feed, without tags: '{text}'",
        "The world should read '{text}' Tweet it just so.",
        partial="Put something out on my feed, without tags.",
        detail=("It says '{text}'", "The words are '{text}'"),
        note=note,
        text=text,
    )


def publish_tagged(draft: Draft) -> UserMessage:
    note = sign_in(draft)
    text, tag = f"{words.sentence(draft.rng)}.", draft.choose(words.TAGS)
    draft.set_fact("tweet", draft.call("post_tweet", content=text, tags=[tag])["id"])
    return draft.phrase(
        "Tweet '{text}' with the single tag '{tag}'.",
        "A tweet, tagged '{tag}': '{text}'",
        partial="Tweet '{text}' with a tag.",
        detail=("The tag is '{tag}'.", "Tag it '{tag}'."),
        note=note,
        text=text,
        tag=tag,
    )


def publish_mentioning(draft: Draft) -> UserMessage:
    note = sign_in(draft)
    text, name = f"{words.sentence(draft.rng)}.", f"@{_stranger(draft)}"
    made = draft.call("post_tweet", content=text, mentions=[name])
    draft.set_fact("tweet", made["id"])
    return draft.phrase(
        "Tweet '{text}' so that it mentions '{name}'.",
        "Let '{name}' know by a tweet that mentions them: '{text}'",
        partial="Tweet '{text}' so that it mentions somebody.",
        detail="Mention '{name}'.",
        note=note,
        text=text,
        name=name,
    )


def comment_on(draft: Draft) -> UserMessage:
    note = sign_in(draft)
    number, text = _post(draft)["id"], f"{words.sentence(draft.rng)}."
    draft.call("comment", tweet_id=number, comment_content=text)
    return draft.phrase(
        "Under tweet {number}, comment '{text}'",
        "Add '{text}' to the comments of the tweet with id {number}.",
        partial="Leave the comment '{text}' under a tweet.",
        detail=("The tweet has id {number}.", "Under number {number}."),
        note=note,
        number=number,
        text=text,
    )


def share(draft: Draft) -> UserMessage:
    note = sign_in(draft)
    number = _post(draft, mine=False)["id"]
    draft.call("retweet", tweet_id=number)
    return draft.phrase(
        "Retweet number {number}.",
        "Tweet {number} deserves readers: pass it on with a retweet.",
        partial="A tweet deserves readers: pass it on with a retweet.",
        detail="Its id: {number}.",
        note=note,
        number=number,
    )


def _mentioning(posts: Iterable[dict[str, Any]]) -> list[int]:
    """Ids of posts that mention somebody: in the official code the others share one list."""
    return [post["id"] for post in posts if post["mentions"]]


def mention_in(draft: Draft) -> UserMessage:
    number = draft.choose(_mentioning(draft.simulator(POSTS).tweets.values()))
    name = f"@{_stranger(draft)}"
    draft.call("mention", tweet_id=number, mentioned_usernames=[name])
    return draft.phrase(
        "Mention '{name}' in tweet {number}.",
        "'{name}' is missing from the mentions of tweet {number}; add that name.",
        partial="Somebody is missing from the mentions of tweet {number}.",
        detail="It is '{name}' who is missing.",
        number=number,
        name=name,
    )


def follow(draft: Draft) -> UserMessage:
    note = sign_in(draft)
    name = _stranger(draft)
    draft.call("follow_user", username_to_follow=name)
    draft.set_fact("followed", name)
    return draft.phrase(
        "I want to keep up with '{name}': follow that account.",
        "From today on I follow '{name}'. Arrange it.",
        partial="Follow another account for me.",
        detail=("That account is '{name}'.", "Follow '{name}'."),
        note=note,
        name=name,
    )


def unfollow(draft: Draft) -> UserMessage:
    note = sign_in(draft)
    name = draft.choose(draft.simulator(POSTS).following_list)
    draft.call("unfollow_user", username_to_unfollow=name)
    return draft.phrase(
        "I have read enough of '{name}'; stop following them.",
        "Take '{name}' off the accounts that I follow.",
        partial="Take one name off the accounts that I follow.",
        detail="'{name}' has to go.",
        note=note,
        name=name,
    )


def unfollow_again(draft: Draft) -> UserMessage:
    name = draft.fact("followed")
    draft.call("unfollow_user", username_to_unfollow=name)
    return draft.phrase(
        "I changed my mind about the account that you made me follow: unfollow it.",
        "Undo that new follow of mine.",
    )


def list_followed(draft: Draft) -> UserMessage:
    note = sign_in(draft)
    draft.call("list_all_following")
    return draft.phrase(
        "Whose accounts do I follow at the moment? All of them, please.",
        "List every account that I am following.",
        note=note,
    )


def search_and_share(draft: Draft) -> UserMessage:
    note = sign_in(draft)
    text = _post(draft, mine=False)["content"]
    word = draft.choose([w for w in text.rstrip(".").split() if len(w) > 4])
    posts = draft.call("search_tweets", keyword=word)
    draft.call("retweet", tweet_id=draft.choose(posts if len(posts) == 1 else [])["id"])
    return draft.phrase(
        "One tweet has '{word}' in it. Search for that word and retweet what you find.",
        "Search the tweets for '{word}', then retweet the match.",
        partial="Search the tweets for a word, then retweet the match.",
        detail="Search for '{word}'.",
        note=note,
        word=word,
    )


def comment_on_authors(draft: Draft) -> UserMessage:
    note = sign_in(draft)
    author, text = _post(draft, mine=False)["username"], f"{words.sentence(draft.rng)}."
    latest = draft.call("get_user_tweets", username=author)[-1]
    draft.call("comment", tweet_id=latest["id"], comment_content=text)
    return draft.phrase(
        "Look up what '{author}' has tweeted and comment '{text}' under the latest.",
        "Get the tweets of '{author}'; the one with the highest id gets the comment '{text}'",
        partial="Look up what someone has tweeted and comment '{text}' under the latest.",
        detail="I mean the tweets of '{author}'.",
        note=note,
        author=author,
        text=text,
    )


def read_post(draft: Draft) -> UserMessage:
    number = _post(draft)["id"]
    draft.call("get_tweet", tweet_id=number)
    return draft.phrase(
        "What does the tweet with id {number} say, and who wrote it?",
        "Fetch tweet {number} for me.",
        partial="Fetch a tweet for me.",
        detail="The id is {number}.",
        number=number,
    )


def count_user(draft: Draft) -> UserMessage:
    name = draft.simulator(POSTS).username
    draft.call("get_user_stats", username=name)
    return draft.phrase(
        "How active has the account '{name}' been? Its statistics will do.",
        "Give me the figures of the account '{name}'.",
        partial="Give me the figures of an account.",
        detail="The account is '{name}'.",
        name=name,
    )


def comment_on_latest(draft: Draft) -> UserMessage:
    text = f"{words.sentence(draft.rng)}."
    draft.call("comment", tweet_id=draft.fact("tweet"), comment_content=text)
    return draft.phrase(
        "Comment '{text}' under the tweet that you sent out last.",
        "The newest tweet of mine needs a comment: '{text}'",
        partial="The newest tweet of mine needs a comment.",
        detail="Comment '{text}'",
        text=text,
    )


def share_latest(draft: Draft) -> UserMessage:
    draft.call("retweet", tweet_id=draft.fact("tweet"))
    return draft.phrase(
        "Retweet the tweet that you sent out last.",
        "Give my newest tweet a retweet of my own.",
    )


def mention_in_latest(draft: Draft) -> UserMessage:
    name = f"@{_stranger(draft)}"
    number = draft.choose(_mentioning([draft.simulator(POSTS).tweets[draft.fact("tweet")]]))
    draft.call("mention", tweet_id=number, mentioned_usernames=[name])
    return draft.phrase(
        "Add '{name}' to the mentions of the tweet that you sent out last.",
        "In my newest tweet, '{name}' should be mentioned too.",
        partial="In my newest tweet, somebody else should be mentioned too.",
        detail="Mention '{name}'.",
        name=name,
    )


POST_REQUESTS = (
    *requests((POSTS,), publish, publish_tagged, publish_mentioning, comment_on, share),
    *requests((POSTS,), mention_in, follow, unfollow, list_followed, search_and_share),
    *requests((POSTS,), comment_on_authors, read_post, count_user),
    *requests((POSTS,), comment_on_latest, share_latest, mention_in_latest, follows="tweet"),
    *requests((POSTS,), unfollow_again, follows="followed"),
)
