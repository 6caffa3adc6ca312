"""Requests to the trading system."""

from __future__ import annotations

from typing import Any

from seeupo_jax.instruments.bfcl_worlds import world_words as words
from seeupo_jax.instruments.bfcl_worlds.draft import Draft, UserMessage, requests
from seeupo_jax.instruments.bfcl_worlds.scenarios import TRADING


def sign_in(draft: Draft) -> str:
    """Signs in if no user is signed in; returns the user's note about it."""
    if draft.simulator(TRADING).authenticated:
        return ""
    name, key = draft.choose(words.HANDLES), words.password(draft.rng)
    draft.call("trading_login", username=name, password=key)
    return draft.rng.choice(
        (
            f" For trading, log in as '{name}', password '{key}'.",
            f" My trading login: '{name}' and '{key}'.",
        )
    )


def symbol_of(draft: Draft) -> str:
    return draft.choose([*draft.simulator(TRADING).stocks])


def _company(draft: Draft) -> str:
    stocks = draft.simulator(TRADING).stocks
    return draft.choose([name for name, symbol in words.COMPANIES.items() if symbol in stocks])


def _order(draft: Draft, *statuses: str) -> int:
    orders = draft.simulator(TRADING).orders
    return draft.choose([k for k, o in orders.items() if not statuses or o["status"] in statuses])


def _place(draft: Draft, **order: Any) -> None:
    draft.set_fact("order", draft.call("place_order", **order)["order_id"])


def quote(draft: Draft) -> UserMessage:
    symbol = symbol_of(draft)
    draft.call("get_stock_info", symbol=symbol)
    return draft.phrase(
        "How is {symbol} doing? Price, volume, averages, all of it.",
        "Give me the numbers on {symbol}.",
        "Where does {symbol} trade at present?",
        partial="Give me the numbers on a stock.",
        detail=("I mean {symbol}.", "Its symbol is {symbol}."),
        symbol=symbol,
    )


def quote_by_name(draft: Draft) -> UserMessage:
    name = _company(draft)
    symbol = draft.call("get_symbol_by_name", name=name)["symbol"]
    draft.call("get_stock_info", symbol=symbol)
    return draft.phrase(
        "I only know the company's name, '{name}'. Look up its symbol, then its numbers.",
        "Which symbol has '{name}', and how does that stock stand?",
        partial="I only know a company's name. Look up its symbol, then its numbers.",
        detail="The name is '{name}'.",
        name=name,
    )


def buy_at_price(draft: Draft) -> UserMessage:
    note = sign_in(draft)
    symbol, amount = symbol_of(draft), draft.rng.randint(2, 40)
    price = draft.call("get_stock_info", symbol=symbol)["price"]
    _place(draft, order_type="Buy", symbol=symbol, price=price, amount=amount)
    return draft.phrase(
        "Check what {symbol} costs and buy {amount} of it at that price.",
        "I want {amount} shares of {symbol}, bought at whatever it stands at now.",
        "Get the price of {symbol}, and order {amount} shares for me at it.",
        partial=("Check what {symbol} costs and buy some of it at that price.",),
        detail=("Make it {amount} shares.", "I want {amount} of them."),
        note=note,
        symbol=symbol,
        amount=amount,
    )


def limit_order(draft: Draft) -> UserMessage:
    note = sign_in(draft)
    kind, symbol = draft.choose(("Buy", "Sell")), symbol_of(draft)
    price, amount = draft.amount(12, 90), draft.rng.randint(2, 40)
    _place(draft, order_type=kind, symbol=symbol, price=price, amount=amount)
    return draft.phrase(
        "{kind} {amount} {symbol} at {price} each.",
        "Place an order: {kind}, {amount} shares, {symbol}, at {price}.",
        "Enter a '{kind}' order over {amount} shares of {symbol} with a price of {price}.",
        partial="Enter a '{kind}' order over {amount} shares of {symbol}, at my price.",
        detail=("My price is {price}.", "At {price}."),
        note=note,
        kind=kind,
        symbol=symbol,
        price=price,
        amount=amount,
    )


def check_order(draft: Draft) -> UserMessage:
    number = _order(draft)
    draft.call("get_order_details", order_id=number)
    return draft.phrase(
        "What became of order {number}?",
        "Give me what is on file for order {number}.",
        partial="What became of my order?",
        detail="Order {number}, I mean.",
        number=number,
    )


def cancel_order(draft: Draft) -> UserMessage:
    number = _order(draft, "Open", "Pending")
    draft.call("cancel_order", order_id=number)
    return draft.phrase(
        "Call off order {number}.",
        "Order {number} must not go through; cancel it.",
        partial="An order of mine must not go through; cancel it.",
        detail="It has number {number}.",
        number=number,
    )


def latest_of_history(draft: Draft) -> UserMessage:
    note = sign_in(draft)
    number = draft.call("get_order_history")["history"][-1]
    draft.call("get_order_details", order_id=number)
    return draft.phrase(
        "Fetch my order history and give me the particulars of the last entry.",
        "Which order comes last in my history, and what is in it?",
        note=note,
    )


def deposit(draft: Draft) -> UserMessage:
    note = sign_in(draft)
    amount = draft.rng.randint(2, 60) * 100.0
    draft.call("fund_account", amount=amount)
    return draft.phrase(
        "Pay {amount:.0f} dollars into my trading account.",
        "Fund the account with {amount:.0f} dollars.",
        partial="Pay some dollars into my trading account.",
        detail=("{amount:.0f} of them.", "Pay in {amount:.0f}."),
        note=note,
        amount=amount,
    )


def withdraw(draft: Draft) -> UserMessage:
    note = sign_in(draft)
    amount = draft.rng.randint(2, 60) * 100.0
    draft.call("withdraw_funds", amount=amount)
    return draft.phrase(
        "Take {amount:.0f} dollars out of my trading account.",
        "I need {amount:.0f} dollars from the trading account; withdraw them.",
        partial="I need dollars from the trading account; withdraw them.",
        detail="{amount:.0f} will do.",
        note=note,
        amount=amount,
    )


def withdraw_half(draft: Draft) -> UserMessage:
    note = sign_in(draft)
    balance = draft.call("get_account_info")["balance"]
    draft.call("withdraw_funds", amount=balance / 2)
    return draft.phrase(
        "See what my trading account holds and withdraw exactly half.",
        "Half of my trading balance is for the roof: look it up and withdraw that much.",
        note=note,
    )


def account(draft: Draft) -> UserMessage:
    note = sign_in(draft)
    draft.call("get_account_info")
    return draft.phrase(
        "How much money is in my trading account, and which card belongs to it?",
        "Show what my trading account looks like.",
        note=note,
    )


def watch(draft: Draft) -> UserMessage:
    bot = draft.simulator(TRADING)
    symbol = draft.choose([symbol for symbol in bot.stocks if symbol not in bot.watch_list])
    draft.call("add_to_watchlist", stock=symbol)
    draft.set_fact("watched", symbol)
    return draft.phrase(
        "Keep an eye on {symbol} for me: on the watch list with it.",
        "{symbol} is missing from my watch list. Add it.",
        partial="A stock is missing from my watch list. Add it.",
        detail=("{symbol} is missing.", "I mean {symbol}."),
        symbol=symbol,
    )


def watch_by_name(draft: Draft) -> UserMessage:
    name = _company(draft)
    symbol = draft.call("get_symbol_by_name", name=name)["symbol"]
    draft.call("add_to_watchlist", stock=symbol)
    draft.set_fact("watched", symbol)
    return draft.phrase(
        "Find the symbol of '{name}' and let me watch that stock.",
        "'{name}' interests me. Look up the symbol and put it on my watch list.",
        name=name,
    )


def unwatch(draft: Draft) -> UserMessage:
    note = sign_in(draft)
    symbol = draft.choose(draft.simulator(TRADING).watch_list)
    draft.call("remove_stock_from_watchlist", symbol=symbol)
    return draft.phrase(
        "{symbol} bores me. Off the watch list.",
        "I no longer watch {symbol}, so strike it from the list.",
        partial="There is a stock that I no longer watch, so strike it from the list.",
        detail="{symbol}, that is.",
        note=note,
        symbol=symbol,
    )


def watch_list(draft: Draft) -> UserMessage:
    note = sign_in(draft)
    draft.call("get_watchlist")
    return draft.phrase(
        "Which stocks do I watch?",
        "Read me my watch list.",
        note=note,
    )


def movers(draft: Draft) -> UserMessage:
    draft.need_unpadded_answers()
    note = sign_in(draft)
    watched = draft.call("get_watchlist")["watchlist"]
    threshold = draft.amount(1, 6)
    draft.call("notify_price_change", stocks=[*watched], threshold=threshold)
    return draft.phrase(
        "Take all stocks of my watch list and notify me of changes from {threshold} percent on.",
        "Get my watch list. Has anything on it moved by {threshold} percent or more?",
        partial="Get my watch list. Has anything on it moved by more than I care for?",
        detail="From {threshold} percent on.",
        note=note,
        threshold=threshold,
    )


def cheap_tech(draft: Draft) -> UserMessage:
    low, high = draft.amount(2, 60), draft.amount(150, 390)
    stocks = draft.call("get_available_stocks", sector="Technology")["stock_list"]
    draft.call("filter_stocks_by_price", stocks=stocks, min_price=low, max_price=high)
    return draft.phrase(
        "Which stocks of the 'Technology' sector cost between {low} and {high}?",
        "Get the available 'Technology' stocks and filter them: from {low} to {high} dollars.",
        partial="Get the available 'Technology' stocks and filter them by price.",
        detail="From {low} to {high} dollars.",
        low=low,
        high=high,
    )


def time_now(draft: Draft) -> UserMessage:
    draft.call("get_current_time")
    return draft.phrase(
        "What time does the trading system show?", "What is the time on the exchange?"
    )


def sign_out(draft: Draft) -> UserMessage:
    draft.call("trading_logout")
    return draft.phrase("Log me out of trading.", "I am done with trading, so sign me out there.")


def check_latest(draft: Draft) -> UserMessage:
    draft.call("get_order_details", order_id=draft.fact("order"))
    return draft.phrase(
        "How does the order that you placed last stand?",
        "Show the particulars of my newest order.",
    )


def cancel_latest(draft: Draft) -> UserMessage:
    draft.call("cancel_order", order_id=draft.fact("order"))
    return draft.phrase(
        "I got cold feet: call off the order that you placed last.",
        "My newest order was a mistake; cancel it.",
    )


def buy_watched(draft: Draft) -> UserMessage:
    note = sign_in(draft)
    symbol, amount = draft.fact("watched"), draft.rng.randint(2, 30)
    price = draft.call("get_stock_info", symbol=symbol)["price"]
    _place(draft, order_type="Buy", symbol=symbol, price=price, amount=amount)
    return draft.phrase(
        "Of the stock that you put on my watch list, buy {amount} shares at its price now.",
        "Look up what the stock that I watch since today costs and buy {amount} at that price.",
        partial="Of the stock that you put on my watch list, buy a few at its price now.",
        detail="{amount} shares.",
        note=note,
        amount=amount,
    )


TRADING_REQUESTS = (
    *requests((TRADING,), quote, quote_by_name, buy_at_price, limit_order, check_order),
    *requests((TRADING,), cancel_order, latest_of_history, deposit, withdraw, withdraw_half),
    *requests((TRADING,), account, watch, watch_by_name, unwatch, watch_list, movers),
    *requests((TRADING,), cheap_tech, time_now, sign_out),
    *requests((TRADING,), check_latest, cancel_latest, follows="order"),
    *requests((TRADING,), buy_watched, follows="watched"),
)
