// In place of mkdocs's search, which needs a worker and a request, neither of which a page opened from the disk has.
(function () {
  var input = document.getElementById("mkdocs-search-query");
  var list = document.getElementById("mkdocs-search-results");
  if (!list) return; // only search.html has results

  function load(name, then) {
    var script = document.createElement("script");
    script.src = base_url + "/search/" + name;
    script.onload = then;
    document.head.appendChild(script);
  }

  function add(parent, tag, text) {
    var element = document.createElement(tag);
    element.textContent = text;
    return parent.appendChild(element);
  }

  function excerpt(text, words) {
    var lower = text.toLowerCase();
    var found = words.map(function (word) { return lower.indexOf(word); }).filter(function (at) { return at >= 0; });
    var start = found.length ? Math.max(0, Math.min.apply(null, found) - 80) : 0;
    return (start ? "… " : "") + text.slice(start, start + 240) + (start + 240 < text.length ? " …" : "");
  }

  function start() {
    var index = lunr(function () {
      this.ref("at");
      this.field("title", { boost: 10 });
      this.field("text");
      search_index.forEach(function (doc, at) {
        this.add({ at: at, title: doc.title + " " + doc.title.split(/[._]+/).join(" "), text: doc.text });
      }, this);
    });

    function show() {
      var words = input.value.toLowerCase().split(/[^\w.]+/).filter(Boolean);
      var hits = index.query(function (query) {
        words.forEach(function (word) {
          query.term(lunr.tokenizer(word), { boost: 10 });
          query.term(word, { wildcard: lunr.Query.wildcard.TRAILING, usePipeline: false });
        });
      });
      list.textContent = "";
      hits.slice(0, 50).forEach(function (hit) {
        var doc = search_index[hit.ref];
        var article = add(list, "article", "");
        add(add(article, "h3", ""), "a", doc.title).href = base_url + "/" + doc.location;
        add(article.lastChild, "small", " " + doc.location.replace(/\.html.*/, ""));
        add(article, "p", excerpt(doc.text, words));
      });
      if (!hits.length) add(list, "p", words.length ? "No page has these words." : "Type a word.");
    }

    input.value = new URLSearchParams(window.location.search).get("q") || "";
    input.addEventListener("input", show);
    show();
  }

  load("lunr.js", function () { load("search_index.js", start); });
})();
